//! A model's tensors, through a slot and a checkpoint, into another model.

use std::borrow::Cow;
use std::io::Write;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use muster_protocol::Digest;
use muster_protocol::control::fresh_page;
use muster_protocol::control::live::{Assignment, Term};

use super::model::commit;
use super::*;
use crate::live::assign;
use crate::page::Page;
use crate::saving::{Dtype, Held, LoadError, Peer, Restore, Saver};
use crate::session::Session;
use crate::testing::Keeper;
use crate::train::{TrainError, load_model};
use crate::{WorkerEnv, train};

/// Saves these on one rank, as a job with a store does.
fn saved(tensors: &[train::Named<'_>]) -> (Arc<Keeper>, Restore) {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&fresh_page()).unwrap();
    let page = Arc::new(Page::from_file(&file).unwrap());
    let digest = Digest([4; 32]);
    assign(
        &page,
        &Assignment {
            term: Term::of(1, 0),
            rank: 0,
            world: 1,
            local_rank: 0,
            local_world: 1,
            node_rank: 0,
            nodes: 1,
            restarts: 0,
            master: SocketAddr::from(([127, 0, 0, 1], 1)),
            digest,
            lineage: Digest([1; 32]),
        },
    );
    let keeper = Keeper::new();
    keeper.watch(page);
    let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
    let env = WorkerEnv {
        rank: 0,
        world: 1,
        local_rank: 0,
        master: None,
        restart: 0,
        generation: 1,
        digest,
    };
    let held = |tensor: &train::Named<'_>| Held::whole(&tensor.name, tensor.dtype, &tensor.shape);
    let held = tensors.iter().map(held).collect();
    let mut saver = Saver::new(&mut session, &env, &[Peer { node: 0, held }]).unwrap();
    let state = |name: &str, _: &_| {
        let found = tensors.iter().find(|tensor| tensor.name == name);
        found.map(|tensor| tensor.bytes.memory())
    };
    saver.save(7, state, Vec::new()).unwrap();
    keeper.until_saved(7);
    let restore = keeper.open(7);
    (keeper, restore)
}

fn trained(seed: u64, rule: Rule) -> TorchModel<()> {
    let options = Options {
        buckets: [10, 200],
        ..Options::new(rule)
    };
    let mut model = TorchModel::new(parts(net(seed)), &options).unwrap();
    for _ in 0..3 {
        let (mut sums, measured) = backward(&mut model, &[micro(0..20)]);
        commit(&mut model, &mut sums, &measured);
    }
    model
}

#[test]
fn a_model_comes_back_from_a_checkpoint_with_all_that_it_keeps() {
    for rule in [Rule::sgd(), Rule::momentum(0.9), Rule::adam_w()] {
        let model = trained(1, rule);
        let tensors = model.tensors().unwrap();
        let of = |name: &str| tensors.iter().find(|t| t.name == name).unwrap();
        let conv = of("model.first.conv.weight");
        assert_eq!(
            (conv.dtype, &conv.shape[..]),
            (Dtype::F32, &[3, 1, 3, 3][..])
        );
        let borrowed =
            |t: &train::Named<'_>| matches!(t.bytes, train::Bytes::Host(Cow::Borrowed(_)));
        assert!(borrowed(conv) && borrowed(of("model.first.norm.running_var")));
        let slots = tensors
            .iter()
            .filter(|t| t.name.starts_with("optim.first.conv.weight."));
        let slots: Vec<&str> = slots.map(|t| t.name.rsplit('.').next().unwrap()).collect();
        let expected: &[&str] = match rule {
            Rule::AdamW(_) => &["exp_avg", "exp_avg_sq"],
            _ if rule == Rule::sgd() => &[],
            _ => &["momentum_buffer"],
        };
        assert_eq!(slots, expected);

        let (_keeper, checkpoint) = saved(&tensors);
        let mut other = trained(2, rule);
        assert_ne!(other.encode(), model.encode());
        let all = load_model(&mut other, &checkpoint, |_| true).unwrap();
        assert_eq!(all, tensors.len());
        assert_eq!(other.encode(), model.encode());
        // Its variables are still views of the same memory, and it goes on alike.
        let mut model = model;
        for model in [&mut model, &mut other] {
            let (mut sums, measured) = backward(model, &[micro(20..40)]);
            commit(model, &mut sums, &measured);
        }
        assert_eq!(other.encode(), model.encode());
    }
}

#[test]
fn a_part_of_a_model_is_loaded_and_the_rest_stays() {
    let model = trained(1, Rule::momentum(0.9));
    let (_keeper, checkpoint) = saved(&model.tensors().unwrap());
    let mut other = trained(2, Rule::adam_w());
    let before = other.optimizer().moments()[0].copy();
    load_model(&mut other, &checkpoint, |name| name.starts_with("model.")).unwrap();
    assert_eq!(bits(&values(other.flat())), bits(&values(model.flat())));
    assert_eq!(other.optimizer().moments()[0], before);
    // What Adam keeps is not there.
    let refused = load_model(&mut other, &checkpoint, |_| true).unwrap_err();
    let TrainError::Checkpoint { source, step: 7 } = refused else {
        panic!("{refused}");
    };
    let missing = source.downcast::<LoadError>().unwrap();
    assert!(matches!(&*missing, LoadError::Missing { name } if name.ends_with(".exp_avg")));
}
