//! Horovod's way of working, over threads.

use super::*;
use crate::env::WorkerEnv;
use crate::gradient::compress::Codec;
use crate::torch::horovod::{DistributedOptimizer, Horovod, HorovodError, Reduce};
use muster_protocol::Digest;

fn hvd(group: Group) -> Horovod {
    let env = WorkerEnv {
        rank: group.rank(),
        world: group.world(),
        local_rank: group.rank(),
        master: None,
        restart: 0,
        generation: 1,
        digest: Digest::ZERO,
    };
    Horovod::with(env, group)
}

/// Trains each rank's half of a batch; the parameters at the end, and the state of the optimizer.
fn train(world: u32, codec: &Codec, steps: usize) -> Vec<(Vec<u32>, Vec<u32>)> {
    on_ranks(world, |group| {
        let mut hvd = hvd(group);
        let (input, target) = (noise(&[8, 6], 1), noise(&[8, 2], 2));
        // Each begins elsewhere.
        let variables = nn::VarStore::new(Device::Cpu);
        let root = variables.root();
        let (one, two) = ([5, 6], [2, 5]);
        let mut weights = [root.zeros("one", &one), root.zeros("two", &two)];
        let seed = u64::from(hvd.rank());
        tch::no_grad(|| {
            weights[0].copy_(&noise(&one, 10 + seed));
            weights[1].copy_(&noise(&two, 20 + seed));
        });
        let rule = Rule::momentum(0.9);
        let mut optimizer = DistributedOptimizer::new(&variables, rule, codec.clone()).unwrap();
        hvd.broadcast_parameters(&variables, 0).unwrap();
        hvd.broadcast_optimizer_state(&mut optimizer, 0).unwrap();
        let part = 8 / i64::from(world);
        let cut = |all: &Tensor| all.narrow(0, i64::from(hvd.rank()) * part, part);
        let (input, target) = (cut(&input), cut(&target));
        let mut losses = Vec::new();
        for _ in 0..steps {
            let hidden = input.linear::<Tensor>(&weights[0], None).tanh();
            let output = hidden.linear::<Tensor>(&weights[1], None);
            let loss = output.mse_loss(&target, tch::Reduction::Mean);
            optimizer.backward(&mut hvd, &loss).unwrap();
            optimizer.step(0.05).unwrap();
            let mean = hvd.allreduce(&loss, Reduce::Average).unwrap();
            losses.push(mean.double_value(&[]));
        }
        assert!(losses[steps - 1] < losses[0] * 0.8, "{losses:?}");
        let moments = optimizer.optimizer().moments();
        let all = weights.iter().flat_map(values).collect::<Vec<f32>>();
        (bits(&all), bits(&values(&moments[0])))
    })
}

#[test]
fn ranks_train_as_one_and_hold_the_same_bits() {
    let alone = train(1, &Codec::None, 12);
    let both = train(2, &Codec::None, 12);
    assert_eq!(both[0], both[1]);
    for (one, two) in alone[0].0.iter().zip(&both[0].0) {
        let (one, two) = (f32::from_bits(*one), f32::from_bits(*two));
        assert!((one - two).abs() < 1e-5, "{one} {two}");
    }
}

#[test]
fn compressed_gradients_keep_the_bits_the_same() {
    let power = Codec::PowerSgd {
        rank: 2,
        shapes: Vec::new(),
    };
    for codec in [Codec::Fp16, Codec::Bf16, power] {
        let all = train(4, &codec, 20);
        assert!(all.iter().all(|rank| *rank == all[0]), "{codec:?}");
    }
}

#[test]
fn tensors_of_all_kinds_are_reduced() {
    let results = on_ranks(3, |group| {
        let mut hvd = hvd(group);
        let rank = f64::from(hvd.rank());
        assert_eq!((hvd.size(), hvd.local_rank()), (3, hvd.rank()));
        let mut said = Vec::new();
        for kind in [
            Kind::Float,
            Kind::Double,
            Kind::Half,
            Kind::BFloat16,
            Kind::Int64,
            Kind::Int,
        ] {
            let own =
                (Tensor::from_slice(&[1.0, 2.0, 6.0, -4.0]).view([2, 2]) + rank).to_kind(kind);
            for how in [Reduce::Sum, Reduce::Average, Reduce::Min, Reduce::Max] {
                let all = hvd.allreduce(&own, how).unwrap();
                assert_eq!((all.kind(), all.size()), (kind, vec![2, 2]));
                said.push(Vec::<f64>::try_from(all.view([-1]).to_kind(Kind::Double)).unwrap());
            }
        }
        let refused = hvd.allreduce(&Tensor::from_slice(&[true]), Reduce::Sum);
        assert!(matches!(refused, Err(HorovodError::Kind(Kind::Bool))));
        said
    });
    assert!(results.iter().all(|said| *said == results[0]));
    for said in results[0].chunks(4) {
        assert_eq!(said[0], [6.0, 9.0, 21.0, -9.0]);
        assert_eq!(said[1], [2.0, 3.0, 7.0, -3.0]);
        assert_eq!(said[2], [1.0, 2.0, 6.0, -4.0]);
        assert_eq!(said[3], [3.0, 4.0, 8.0, -2.0]);
    }
}
