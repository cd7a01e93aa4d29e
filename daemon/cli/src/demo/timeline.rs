//! The run as a picture: a row per node, time from left to right.

use super::recording::{Down, Recording};

/// Columns of the picture.
const WIDTH: u64 = 72;

/// A row per node with the number of the generation that its worker trains in, and a row with the
/// loss; `until_ms` is the right edge, in Unix milliseconds.
pub(super) fn text(recording: &Recording, until_ms: u64) -> String {
    let from = recording.began_ms;
    let span = until_ms.saturating_sub(from).max(WIDTH);
    let column = |ms: u64| (ms.saturating_sub(from) * WIDTH / span).min(WIDTH - 1);
    let name_width = recording
        .nodes
        .iter()
        .map(|n| n.name.len())
        .max()
        .unwrap_or(0)
        .max(4);
    let mut text = format!("{:name_width$} {}\n", "", axis(span));
    for node in &recording.nodes {
        let mut row: Vec<char> = (0..WIDTH)
            .map(|c| {
                let up = c >= column(node.up_ms);
                let gone = node.down.is_some_and(|(ms, _)| c > column(ms));
                if up && !gone { '.' } else { ' ' }
            })
            .collect();
        for (number, workers) in &recording.workers {
            for worker in workers.iter().filter(|w| w.node == node.name) {
                let since = worker.first_step_ms.unwrap_or(worker.last_ms);
                for at in column(since)..=column(worker.last_ms) {
                    put(&mut row, at, digit(*number));
                }
            }
        }
        if let Some((ms, down)) = node.down {
            let mark = match down {
                Down::Killed => 'x',
                Down::Drained => 'v',
            };
            put(&mut row, column(ms), mark);
        }
        let row: String = row.into_iter().collect();
        text.push_str(&format!("{:name_width$} {}\n", node.name, row.trim_end()));
    }
    text.push_str(&format!(
        "{:name_width$} {}\n",
        "loss",
        losses(recording, column)
    ));
    text.push_str(
        "1 2 3 ...: trains in that generation; . up, not training; x SIGKILL; v SIGTERM\n",
    );
    text
}

fn put(row: &mut [char], at: u64, mark: char) {
    if let Some(place) = usize::try_from(at).ok().and_then(|at| row.get_mut(at)) {
        *place = mark;
    }
}

fn digit(number: u64) -> char {
    u32::try_from(number % 36)
        .ok()
        .and_then(|n| char::from_digit(n, 36))
        .unwrap_or('?')
}

/// Marks at whole seconds, at most one every eight columns.
fn axis(span_ms: u64) -> String {
    let step = [1, 2, 5, 10, 20, 30, 60, 120, 300]
        .into_iter()
        .find(|s| s * 1000 * WIDTH / span_ms >= 8)
        .unwrap_or(600);
    let mut line = String::new();
    for second in (0..=span_ms / 1000).step_by(step as usize) {
        let at = (second * 1000 * WIDTH / span_ms) as usize;
        while line.len() < at {
            line.push(' ');
        }
        line.push_str(&format!("{second}s"));
    }
    line
}

/// The loss by time on a logarithmic scale from its highest to its lowest.
fn losses(recording: &Recording, column: impl Fn(u64) -> u64) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let mut sums = vec![(0.0f64, 0u32); WIDTH as usize];
    for (loss, ms) in recording.losses.values() {
        if let Some((sum, count)) = sums.get_mut(column(*ms) as usize) {
            *sum += f64::from(loss.max(1e-9)).ln();
            *count += 1;
        }
    }
    let means: Vec<Option<f64>> = sums
        .iter()
        .map(|(sum, count)| (*count > 0).then(|| sum / f64::from(*count)))
        .collect();
    let low = means
        .iter()
        .flatten()
        .copied()
        .fold(f64::INFINITY, f64::min);
    let high = means
        .iter()
        .flatten()
        .copied()
        .fold(f64::NEG_INFINITY, f64::max);
    let bar = |mean: &Option<f64>| match mean {
        None => ' ',
        Some(mean) => {
            let part = (mean - low) / (high - low).max(1e-9);
            let at = (part * (BARS.len() - 1) as f64).round() as usize;
            BARS.get(at).copied().unwrap_or('█')
        }
    };
    let row: String = means.iter().map(bar).collect();
    row.trim_end().to_owned()
}
