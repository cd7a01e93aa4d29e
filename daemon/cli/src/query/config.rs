//! `muster config`: what an agent started here would be told, and by what.

use std::path::PathBuf;

use muster_daemon::config::{self, Effective, Flags, Inputs};
use serde_json::json;

use super::Out;
use super::output::{Cell, Failure, Style, Table, Tone, clean, put, put_json};

/// `muster config`
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The configuration file [default: /etc/muster/musterd.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    out: Out,
}

pub(super) fn main(args: &Args, style: &Style) -> Result<(), Failure> {
    let flags = Flags {
        config: args.config.clone(),
        ..Flags::default()
    };
    let (config, mut effective) =
        config::read(&Inputs::from_process(flags)).map_err(|e| Failure::Refused(e.to_string()))?;
    if let Err(error) = config::check_secret(&config) {
        let warning = format!("no agent would start: {error}");
        effective.warnings.push(warning);
    }
    if args.out.json() {
        let rows: Vec<_> = effective
            .rows
            .iter()
            .map(|r| json!({ "key": r.key, "value": r.value, "source": r.source.to_string() }))
            .collect();
        return put_json(&json!({ "rows": rows, "warnings": effective.warnings }));
    }
    put(render(&effective, style).as_bytes())
}

fn render(effective: &Effective, style: &Style) -> String {
    let mut table = Table::new(&["KEY", "VALUE", "SOURCE"]);
    for row in &effective.rows {
        let source = row.source.to_string();
        let tone = if source == "default" {
            Tone::Dim
        } else {
            Tone::Plain
        };
        table.row(vec![
            row.key.into(),
            row.value.as_str().into(),
            Cell::new(tone, source),
        ]);
    }
    let mut out = table.render(style);
    for warning in &effective.warnings {
        out.push_str(&style.paint(Tone::Warn, &format!("note: {}", clean(warning))));
        out.push('\n');
    }
    let note = "This is what an agent would be told if it were started from here; one that runs may have had other flags and variables.";
    out.push_str(&style.paint(Tone::Dim, note));
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn every_value_names_its_source() {
        let inputs = Inputs {
            environment: BTreeMap::from([
                ("MUSTER_SUSPECT_AFTER".into(), "3s".into()),
                ("MUSTER_INSECURE".into(), "yes".into()),
            ]),
            ..Inputs::default()
        };
        let (_, effective) = config::read(&inputs).unwrap();
        let text = render(&effective, &Style { colour: false });
        let row = |key: &str| {
            let line = text.lines().find(|l| l.starts_with(key)).unwrap();
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            row("suspect_after"),
            "suspect_after \"3s\" environment MUSTER_SUSPECT_AFTER"
        );
        assert_eq!(row("cluster"), "cluster \"default\" default");
    }
}
