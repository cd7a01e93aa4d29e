//! The choice `--replicas`: how other nodes hold what is sealed here.

use muster_protocol::memory::parity::{MAX_OVER, MIN_OVER};

/// Of each image that a rank of this node seals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    #[default]
    Nothing,
    /// One other node holds it whole.
    Copy,
    /// So many others, or more, each hold a stripe of it, added up with those of the others.
    Parity(u8),
}

impl Choice {
    /// As on the command line.
    ///
    /// # Errors
    /// It is none; the text says what may be written.
    pub fn parse(text: &str) -> Result<Choice, String> {
        let over = format!("{MIN_OVER} to {MAX_OVER} nodes");
        match text.strip_prefix("parity:") {
            None => match text {
                "0" => Ok(Choice::Nothing),
                "1" => Ok(Choice::Copy),
                _ => Err(format!(
                    "write 0 (nothing), 1 (a whole copy on another node) or parity:K (K from {MIN_OVER} to {MAX_OVER})"
                )),
            },
            Some("0") => Err(format!(
                "parity is over {over}: write parity:{MIN_OVER}, or --replicas 0 for nothing"
            )),
            Some("1") => Err("parity over one node is a whole copy: write --replicas 1".into()),
            Some(nodes) => match nodes.parse() {
                Ok(nodes @ MIN_OVER..=MAX_OVER) => Ok(Choice::Parity(nodes)),
                Ok(_) => Err(format!("parity is over {over}: write parity:{MAX_OVER}")),
                Err(_) => Err(format!(
                    "behind parity: is a number of nodes, from {MIN_OVER} to {MAX_OVER}: write parity:4"
                )),
            },
        }
    }

    /// Nodes that parity is over; 0 without it.
    pub fn over(self) -> u8 {
        match self {
            Choice::Parity(nodes) => nodes,
            Choice::Nothing | Choice::Copy => 0,
        }
    }
}

impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Choice::Nothing => f.write_str("0"),
            Choice::Copy => f.write_str("1"),
            Choice::Parity(nodes) => write!(f, "parity:{nodes}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_choice_says_what_is_one() {
        for (text, choice) in [
            ("0", Choice::Nothing),
            ("1", Choice::Copy),
            ("parity:2", Choice::Parity(2)),
            ("parity:8", Choice::Parity(8)),
        ] {
            assert_eq!(Choice::parse(text), Ok(choice));
            assert_eq!(choice.to_string(), text);
            let over = choice.over();
            assert_eq!(over > 0, text == format!("parity:{over}"));
        }
        for (text, words) in [
            ("", "write 0 (nothing), 1 (a whole copy"),
            ("2", "or parity:K (K from 2 to 8)"),
            ("parity", "or parity:K"),
            ("Parity:3", "or parity:K"),
            ("parity:0", "--replicas 0 for nothing"),
            ("parity:1", "write --replicas 1"),
            ("parity:9", "write parity:8"),
            ("parity:255", "write parity:8"),
            ("parity:256", "a number of nodes, from 2 to 8"),
            ("parity:-2", "a number of nodes"),
            ("parity:x", "a number of nodes"),
            ("parity:", "a number of nodes"),
            ("parity:3 ", "a number of nodes"),
        ] {
            let error = Choice::parse(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
