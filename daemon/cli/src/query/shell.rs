//! Completions and the manual page, made from the command line itself.

use std::path::PathBuf;

use clap_complete::Shell;

use super::output::{Failure, put};

/// `muster completions`
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The shell. bash: `source <(muster completions bash)` in ~/.bashrc; fish: `muster completions
    /// fish > ~/.config/fish/completions/muster.fish`; zsh: into a file `_muster` on $fpath
    #[arg(value_enum)]
    shell: Shell,
}

/// `muster man`
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// A directory for the pages of all commands: muster.1, muster-run.1, ...
    dir: Option<PathBuf>,
}

pub(super) fn completions(args: &Args, mut whole: clap::Command) -> Result<(), Failure> {
    let mut out = Vec::new();
    clap_complete::generate(args.shell, &mut whole, "muster", &mut out);
    put(&out)
}

/// The page of `muster` itself, in roff; with a folder, the pages of all commands into it.
pub(super) fn man(args: &ManArgs, whole: clap::Command) -> Result<(), Failure> {
    let Some(dir) = &args.dir else {
        let mut out = Vec::new();
        clap_mangen::Man::new(whole)
            .render(&mut out)
            .map_err(|e| Failure::Refused(format!("cannot make the page: {e}")))?;
        return put(&out);
    };
    clap_mangen::generate_to(whole, dir).map_err(|e| {
        Failure::Refused(format!(
            "cannot write the pages to {}: {e}; name a directory that exists",
            dir.display()
        ))
    })
}
