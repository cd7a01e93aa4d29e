//! Tables, colours, times, and what a command ends with.

use std::fmt;
use std::io::{self, IsTerminal, Write};

use serde_json::Value;

/// `-o`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// A table
    Text,
    /// A table with more columns and whole ids
    Wide,
    /// JSON, with keys that stay
    Json,
}

/// Why a command did not do what it was asked.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The agent refused, or something failed; the text names the fix.
    Refused(String),
    /// The request does not make sense, or is ambiguous.
    Usage(String),
    /// No agent answers.
    Unreachable(String),
    /// The reader of stdout closed it.
    NobodyReads,
}

impl Failure {
    /// The exit code; they are part of the interface (see [`super::EXIT_CODES`]).
    pub(super) fn code(&self) -> u8 {
        match self {
            Failure::Refused(_) => 1,
            Failure::Usage(_) => 2,
            Failure::Unreachable(_) => 3,
            Failure::NobodyReads => 0,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Refused(text) | Failure::Usage(text) | Failure::Unreachable(text) => {
                f.write_str(text)
            }
            Failure::NobodyReads => Ok(()),
        }
    }
}

/// Writes to stdout.
pub(super) fn put(bytes: &[u8]) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)
        .and_then(|()| out.flush())
        .map_err(|e| match e.kind() {
            io::ErrorKind::BrokenPipe => Failure::NobodyReads,
            _ => Failure::Refused(format!("cannot write the output: {e}")),
        })
}

/// Prints a value as `-o json` does.
pub(super) fn put_json(value: &Value) -> Result<(), Failure> {
    put(format!("{value:#}\n").as_bytes())
}

/// How a piece of text looks on a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tone {
    Plain,
    Head,
    Good,
    Warn,
    Bad,
    Dim,
}

/// Whether colours are used at all.
#[derive(Debug, Clone, Copy)]
pub(super) struct Style {
    pub(super) colour: bool,
}

impl Style {
    /// Colours on a terminal, unless NO_COLOR is set (no-color.org) or the terminal has none.
    pub(super) fn of_stdout() -> Style {
        let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty());
        let dumb = set("TERM").is_none_or(|t| t == "dumb");
        Style {
            colour: io::stdout().is_terminal() && set("NO_COLOR").is_none() && !dumb,
        }
    }

    pub(super) fn paint(&self, tone: Tone, text: &str) -> String {
        let code = match tone {
            Tone::Plain => "",
            Tone::Head => "1",
            Tone::Good => "32",
            Tone::Warn => "33",
            Tone::Bad => "31",
            Tone::Dim => "2",
        };
        if !self.colour || code.is_empty() || text.is_empty() {
            return text.to_owned();
        }
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// Text from elsewhere on one line: host names and workers' output come from other machines, and
/// must not move the cursor or set a title.
pub(super) fn clean(text: &str) -> String {
    text.trim_end()
        .chars()
        .map(|c| match c {
            '\n' | '\t' => ' ',
            c if c.is_control() => '?',
            c => c,
        })
        .collect()
}

/// Like [`clean`], and line breaks stay.
pub(super) fn clean_lines(text: &str) -> String {
    let lines: Vec<String> = text.lines().map(clean).collect();
    lines.join("\n")
}

/// One field of a table.
#[derive(Debug, Clone)]
pub(super) struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    pub(super) fn new(tone: Tone, text: impl AsRef<str>) -> Cell {
        let text = clean(text.as_ref());
        let text = if text.is_empty() { "-".into() } else { text };
        Cell { text, tone }
    }
}

impl<T: AsRef<str>> From<T> for Cell {
    fn from(text: T) -> Cell {
        Cell::new(Tone::Plain, text)
    }
}

/// Rows under a head, every column as wide as its widest field.
#[derive(Debug)]
pub(super) struct Table {
    rows: Vec<Vec<Cell>>,
}

impl Table {
    pub(super) fn new(head: &[&str]) -> Table {
        let head = head.iter().map(|h| Cell::new(Tone::Dim, h)).collect();
        Table { rows: vec![head] }
    }

    pub(super) fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(cells);
    }

    pub(super) fn render(&self, style: &Style) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|c| c.text.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut out = String::new();
        for row in &self.rows {
            for (at, (cell, width)) in row.iter().zip(&widths).enumerate() {
                out.push_str(&style.paint(cell.tone, &cell.text));
                if at + 1 < row.len() {
                    let pad = width.saturating_sub(cell.text.chars().count()) + 2;
                    out.extend(std::iter::repeat_n(' ', pad));
                }
            }
            out.push('\n');
        }
        out
    }
}

/// Names and values under each other.
pub(super) fn pairs(rows: &[(&str, String)], style: &Style) -> String {
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 2;
    rows.iter()
        .map(|(name, value)| {
            let pad = " ".repeat(width - name.len());
            format!("{}{pad}{}\n", style.paint(Tone::Dim, name), value)
        })
        .collect()
}

/// A field as text; empty where it is absent or null.
pub(super) fn field(row: &Value, key: &str) -> String {
    match row.get(key) {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

pub(super) fn flag(row: &Value, key: &str) -> bool {
    row.get(key).and_then(Value::as_bool).unwrap_or(false)
}

pub(super) fn list<'a>(row: &'a Value, key: &str) -> &'a [Value] {
    row.get(key).and_then(Value::as_array).map_or(&[], |v| v)
}

/// How many nodes a generation has: its list of members may be cut.
pub(super) fn member_count(generation: &Value) -> u64 {
    let listed = list(generation, "members").len() as u64;
    let told = generation.get("nodes").and_then(Value::as_u64);
    told.unwrap_or(listed)
}

/// The first eight digits of an id.
pub(super) fn short(id: &str) -> &str {
    id.get(..8).unwrap_or(id)
}

/// `1 node`, `2 nodes`.
pub(super) fn counted(n: u64, noun: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{n} {noun}{s}")
}

/// The middle of two units that people read at a glance: `840 us`, `12 ms`, `1.24 s`, `3 min 5 s`.
pub(super) fn duration_ms(ms: f64) -> String {
    match ms {
        ms if ms < 0.0005 => "0 ms".into(),
        ms if ms < 1.0 => format!("{:.0} us", ms * 1e3),
        ms if ms < 10.0 => format!("{ms:.1} ms"),
        ms if ms < 1e3 => format!("{ms:.0} ms"),
        ms if ms < 60e3 => format!("{:.2} s", ms / 1e3),
        ms if ms < 3600e3 => format!("{:.0} min {:.0} s", (ms / 60e3).floor(), (ms % 60e3) / 1e3),
        ms => format!(
            "{:.0} h {:.0} min",
            (ms / 3600e3).floor(),
            (ms % 3600e3) / 60e3
        ),
    }
}

/// A time in a column: `12s`, `5m`, `3h10m`, `2d4h`.
pub(super) fn age(ms: u64) -> String {
    let seconds = ms / 1_000;
    let (minutes, hours, days) = (seconds / 60, seconds / 3_600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m"),
        (0, _, _) => format!("{hours}h{}m", minutes % 60),
        _ => format!("{days}d{}h", hours % 24),
    }
}

/// Unix milliseconds as date and time, UTC: the same on every node. The calendar is Howard Hinnant's `civil_from_days`.
pub(crate) fn utc(ms: u64) -> (String, String) {
    let (days, rest) = (ms / 86_400_000, ms % 86_400_000);
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (s, milli) = (rest / 1000, rest % 1000);
    (
        format!("{year:04}-{month:02}-{day:02}"),
        format!(
            "{:02}:{:02}:{:02}.{milli:03}",
            s / 3600,
            s / 60 % 60,
            s % 60
        ),
    )
}

/// Bytes, for people.
pub(super) fn gib(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    match mib {
        mib if mib < 0.1 => format!("{:.1} KiB", mib * 1024.0),
        mib if mib < 100.0 => format!("{mib:.1} MiB"),
        mib => format!("{:.2} GiB", mib / 1024.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_whatever_the_colours() {
        let mut table = Table::new(&["A", "LONG"]);
        table.row(vec![Cell::new(Tone::Bad, "wörter"), "".into()]);
        table.row(vec!["x".into(), "y".into()]);
        let plain = table.render(&Style { colour: false });
        assert_eq!(plain, "A       LONG\nwörter  -\nx       y\n");
        let coloured = table.render(&Style { colour: true });
        assert!(coloured.contains("\x1b[31mwörter\x1b[0m  "));
        assert!(coloured.contains("\nx       y\n"));
    }

    #[test]
    fn text_of_strangers_cannot_steer_the_terminal() {
        assert_eq!(clean("a\x1b]0;evil\x07b\nc\u{9b}d"), "a?]0;evil?b c?d");
        assert_eq!(clean_lines("a\nb\x08"), "a\nb?");
    }

    #[test]
    fn times_for_people() {
        let check = |ms: u64, date: &str, time: &str| {
            assert_eq!(utc(ms), (date.to_owned(), time.to_owned()));
        };
        check(0, "1970-01-01", "00:00:00.000");
        check(951_782_400_000, "2000-02-29", "00:00:00.000");
        check(1_709_251_199_999, "2024-02-29", "23:59:59.999");
        check(1_735_689_600_000, "2025-01-01", "00:00:00.000");
        let texts = [0.0, 0.25, 3.21, 312.4, 1240.0, 185_000.0, 7_500_000.0].map(duration_ms);
        assert_eq!(
            texts,
            [
                "0 ms",
                "250 us",
                "3.2 ms",
                "312 ms",
                "1.24 s",
                "3 min 5 s",
                "2 h 5 min"
            ]
        );
    }
}
