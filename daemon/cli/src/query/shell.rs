//! Completions and the manual page, made from the command line itself.

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

pub(super) fn completions(args: &Args, mut whole: clap::Command) -> Result<(), Failure> {
    let mut out = Vec::new();
    clap_complete::generate(args.shell, &mut whole, "muster", &mut out);
    put(&out)
}

/// One page with all commands, in roff: `muster man > muster.1`.
pub(super) fn man(whole: &clap::Command) -> Result<(), Failure> {
    let failed = |e: std::io::Error| Failure::Refused(format!("cannot make the page: {e}"));
    let mut out = Vec::new();
    clap_mangen::Man::new(whole.clone())
        .render(&mut out)
        .map_err(failed)?;
    for command in whole.get_subcommands().filter(|c| !c.is_hide_set()) {
        let page = clap_mangen::Man::new(
            command
                .clone()
                .bin_name(format!("muster {}", command.get_name())),
        );
        let mut heading = clap_mangen::roff::Roff::default();
        heading.control(
            "SH",
            [format!("MUSTER {}", command.get_name().to_uppercase()).as_str()],
        );
        heading.to_writer(&mut out).map_err(failed)?;
        page.render_description_section(&mut out).map_err(failed)?;
        page.render_options_section(&mut out).map_err(failed)?;
    }
    put(&out)
}
