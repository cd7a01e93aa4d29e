//! The launcher as a process, against an agent that only speaks the local frames.

#[cfg(test)]
mod blocked;
#[cfg(test)]
mod ends;
#[cfg(test)]
mod fake;
#[cfg(test)]
mod runs;
#[cfg(test)]
mod torch;
