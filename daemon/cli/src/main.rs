fn main() {}

#[cfg_attr(
    not(test),
    expect(dead_code, reason = "read by the launcher, which is not here yet")
)]
mod slurm;
