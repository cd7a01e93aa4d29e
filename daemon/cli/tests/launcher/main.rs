//! The launcher as a process, against an agent that only speaks the local frames.

mod ends;
mod fake;
mod runs;
