//! A small GPT that writes "Alice's Adventures in Wonderland", letter by letter, trained on as many nodes as there are.
//!
//! `muster run --nnodes 1:3 -- target/release/examples/gpt`. Kill a node: the others go on where they are. `--layers`,
//! `--width`, `--heads` and `--context` are the model's, `--letters` says how much it writes at the end; `--help` lists
//! the other flags.
//!
//! The model is that of Radford et al.: Language Models are Unsupervised Multitask Learners (GPT-2), 2019, with
//! the normalization before each part of a block.

mod training;

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

use muster_runtime::data::Tail;
use muster_runtime::torch::{Labelled, Net, Parts, Rule, Source, TorchModel};
use muster_runtime::train::Config;
use tch::nn::{self, Module};
use tch::{Kind, Tensor};
use training::{Args, Defaults};

/// In the public domain: examples/alice/README.md.
const TEXT: &str = include_str!("../../examples/alice/alice.txt");

const DEFAULTS: Defaults = Defaults {
    steps: 500,
    batch: 32,
    rate: 0.002,
    eval_every: 250,
    more: &[
        ("layers", 4),
        ("width", 128),
        ("heads", 4),
        ("context", 64),
        ("letters", 300),
    ],
};

fn main() -> ExitCode {
    training::finish(run())
}

fn run() -> Result<(), Box<dyn Error>> {
    let Some(args) = Args::parse(&DEFAULTS)? else {
        return Ok(());
    };
    let text = Text::new(TEXT);
    let context = args.get("context").unsigned_abs().max(2);
    // The end of the book is kept for the test.
    let cut = text.letters.len() / 10 * 9;
    let (train, held_out) = text.letters.split_at(cut);
    let windows = train.len() as u64 - context;
    let held_out_windows = (held_out.len() as u64 - 1) / context;
    let config = Config {
        max_norm: Some(1.0),
        ..args.config(windows, Tail::Drop, 0.1)
    };
    tch::manual_seed(args.seed.cast_signed());
    let parts = Parts {
        net: net(&args, text.alphabet.len() as i64),
        // Per letter; the sum over windows.
        loss: Box::new(move |scores, next| {
            let scores = scores.flatten(0, 1);
            let next = next.flatten(0, 1);
            let sum =
                scores.cross_entropy_loss::<Tensor>(&next, None, tch::Reduction::Sum, -100, 0.0);
            sum / context as f64
        }),
        train: windows_of(train, context, 1),
        held_out: windows_of(held_out, context, context),
        score: None,
    };
    let model = TorchModel::new(parts, &args.options(Rule::adam_w()))?;
    if let Some(model) = training::train(model, config, held_out_windows, &args)? {
        let written = write(model.net(), &text, &args)?;
        println!("it writes:\n{written}");
    }
    Ok(())
}

/// A text as numbers of letters.
struct Text {
    alphabet: Vec<char>,
    letters: Vec<i64>,
}

impl Text {
    fn new(text: &str) -> Text {
        let mut alphabet: Vec<char> = text.chars().collect();
        alphabet.sort_unstable();
        alphabet.dedup();
        let number = |letter| alphabet.binary_search(&letter).map_or(0, |at| at as i64);
        let letters = text.chars().map(number).collect();
        Text { alphabet, letters }
    }
}

/// Windows of the text, one after `stride` letters, each with the letters that come next.
fn windows_of(letters: &[i64], context: u64, stride: u64) -> Source<()> {
    let letters: Arc<[i64]> = letters.into();
    Box::new(move |micro| {
        let cut = |shift: u64| -> Result<Tensor, tch::TchError> {
            let mut all: Vec<i64> = Vec::new();
            for index in &micro.indices {
                let start = (index * stride + shift) as usize;
                all.extend(letters.iter().skip(start).take(context as usize));
            }
            Tensor::f_from_slice(&all)?.f_view([-1, context as i64])
        };
        Ok(Labelled {
            input: cut(0)?,
            target: cut(1)?,
        })
    })
}

/// Windows of letters; for each letter, scores of the next one.
fn net(args: &Args, alphabet: i64) -> Net {
    let (width, heads) = (args.get("width"), args.get("heads").max(1));
    let (context, layers) = (args.get("context").max(2), args.get("layers").max(1));
    let small = nn::Init::Randn {
        mean: 0.0,
        stdev: 0.02,
    };
    let linear = nn::LinearConfig {
        ws_init: small,
        bs_init: Some(nn::Init::Const(0.0)),
        bias: true,
    };
    let mut net = Net::new(args.device);
    net.stage("embedding", |path| {
        let config = nn::EmbeddingConfig {
            ws_init: small,
            ..Default::default()
        };
        let letters = nn::embedding(path / "letters", alphabet, width, config);
        let places = path.var("places", &[context, width], small);
        move |x, train| {
            let places = places.narrow(0, 0, x.size().last().copied().unwrap_or(0));
            (letters.forward(x) + places).dropout(0.1, train)
        }
    });
    for layer in 0..layers {
        net.stage(&format!("block{layer}"), |path| {
            let norms = ["norm1", "norm2"]
                .map(|name| nn::layer_norm(path / name, vec![width], Default::default()));
            let ask = nn::linear(path / "attention", width, 3 * width, linear);
            let answer = nn::linear(path / "answer", width, width, linear);
            let wide = nn::linear(path / "wide", width, 4 * width, linear);
            let narrow = nn::linear(path / "narrow", 4 * width, width, linear);
            move |x, train| {
                // Windows, letters, width; in between by heads.
                let head = |part: &Tensor| part.unflatten(-1, [heads, -1]).transpose(1, 2);
                let all = ask.forward(&norms[0].forward(x));
                let parts: Vec<Tensor> = all.chunk(3, -1).iter().map(head).collect();
                let attended = Tensor::scaled_dot_product_attention::<Tensor>(
                    &parts[0], &parts[1], &parts[2], None, 0.0, true, None, false,
                );
                let attended = attended.transpose(1, 2).flatten(2, -1);
                let x = x + answer.forward(&attended).dropout(0.1, train);
                let thought = wide.forward(&norms[1].forward(&x)).gelu("tanh");
                &x + narrow.forward(&thought).dropout(0.1, train)
            }
        });
    }
    net.stage("letters", |path| {
        let norm = nn::layer_norm(path / "norm", vec![width], Default::default());
        let scores = nn::linear(path / "scores", width, alphabet, linear);
        move |x, _train| scores.forward(&norm.forward(x))
    });
    net
}

/// Goes on from the book's first words.
fn write(net: &Net, text: &Text, args: &Args) -> Result<String, tch::TchError> {
    let _guard = tch::no_grad_guard();
    tch::manual_seed(args.seed.cast_signed());
    let context = args.get("context").max(2);
    let number = |letter| text.alphabet.binary_search(&letter).ok();
    let begin = "Alice ".chars().filter_map(number);
    let mut letters: Vec<i64> = begin.map(|at| at as i64).collect();
    for _ in 0..args.get("letters") {
        let from = letters.len().saturating_sub(context as usize);
        let window = Tensor::f_from_slice(letters.get(from..).unwrap_or(&[]))?;
        let window = window.f_view([1, -1])?.f_to_device(args.device)?;
        let scores = net.forward(&window, false).f_select(1, -1)?;
        let next = (scores / 0.8)
            .f_softmax(-1, Kind::Float)?
            .f_multinomial(1, false)?;
        letters.push(next.f_int64_value(&[0, 0])?);
    }
    let letter = |number: &i64| text.alphabet.get(usize::try_from(*number).ok()?).copied();
    Ok(letters.iter().filter_map(letter).collect())
}
