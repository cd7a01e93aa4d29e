//! Display of the demo while it runs: a line per event, and on a terminal the progress below them.

use std::io::{self, IsTerminal, Write};
use std::time::Instant;

use super::recording::Recording;

/// Steps between lines of progress where there is no terminal: a tenth of the training.
const PARTS: u64 = 10;

/// The screen. With JSON asked for it is stderr, so that stdout holds nothing else.
pub(super) struct Screen {
    out: Box<dyn Write>,
    terminal: bool,
    quiet: bool,
    began: Instant,
    parts: u64,
    status: String,
}

impl std::fmt::Debug for Screen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Screen")
            .field("terminal", &self.terminal)
            .finish_non_exhaustive()
    }
}

impl Screen {
    pub(super) fn new(quiet: bool, json: bool) -> Screen {
        let (out, terminal): (Box<dyn Write>, bool) = if json {
            (Box::new(io::stderr()), io::stderr().is_terminal())
        } else {
            (Box::new(io::stdout()), io::stdout().is_terminal())
        };
        Screen {
            out,
            terminal,
            quiet,
            began: Instant::now(),
            parts: 0,
            status: String::new(),
        }
    }

    /// One line, with the seconds since the begin. A reader that went away stops nothing.
    pub(super) fn line(&mut self, text: &str) {
        if self.quiet {
            return;
        }
        let at = self.began.elapsed().as_secs_f64();
        self.clear();
        for line in text.lines() {
            let _gone = writeln!(self.out, "{at:6.2}s  {line}");
        }
        self.draw();
    }

    /// How far the training is.
    pub(super) fn progress(&mut self, recording: &Recording, steps: u64) {
        let done = recording.progress();
        if self.quiet || done == 0 {
            return;
        }
        let loss = recording.losses.get(&done).map_or(0.0, |(loss, _)| *loss);
        if self.terminal {
            let width = 24;
            let full = usize::try_from(done * width as u64 / steps.max(1)).unwrap_or(width);
            let bar: String = "#".repeat(full.min(width)) + &".".repeat(width - full.min(width));
            let status = format!("         [{bar}] step {done} of {steps}, loss {loss:.4}");
            if status != self.status {
                self.clear();
                self.status = status;
                self.draw();
            }
        } else if done * PARTS / steps.max(1) > self.parts {
            self.parts = done * PARTS / steps.max(1);
            self.line(&format!("step {done} of {steps}, loss {loss:.4}"));
        }
    }

    /// Ends the line of progress.
    pub(super) fn end(&mut self) {
        self.clear();
        self.status.clear();
        let _gone = self.out.flush();
    }

    fn clear(&mut self) {
        if self.terminal && !self.status.is_empty() {
            let _gone = write!(self.out, "\r\x1b[K");
        }
    }

    fn draw(&mut self) {
        if self.terminal && !self.status.is_empty() {
            let _gone = write!(self.out, "{}", self.status);
        }
        let _gone = self.out.flush();
    }
}
