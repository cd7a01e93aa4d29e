//! A wall clock that jumps.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Adds the seconds in the file that $WALL_CLOCK names to the wall clock of a program.
const SHIM: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <stdio.h>
#include <time.h>
#include <sys/time.h>
static long offset(void) {
    const char *path = getenv("WALL_CLOCK");
    FILE *file = path ? fopen(path, "re") : NULL;
    long seconds = 0;
    if (file) { if (fscanf(file, "%ld", &seconds) != 1) seconds = 0; fclose(file); }
    return seconds;
}
int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, at);
    if (result == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += offset();
    return result;
}
"#;

/// A wall clock that jumps where a test says so, for programs that are started with its variables.
pub(crate) struct FalseClock {
    library: PathBuf,
    offset: PathBuf,
}

impl FalseClock {
    /// In a folder of the test's; says so and returns `None` where there is no C compiler.
    pub(crate) fn build(dir: &Path) -> Option<FalseClock> {
        let (source, library) = (dir.join("shim.c"), dir.join("shim.so"));
        std::fs::write(&source, SHIM).unwrap();
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .arg(&library)
            .arg(&source)
            .arg("-ldl")
            .status();
        if !built.is_ok_and(|status| status.success()) {
            eprintln!("skipped: there is no C compiler for the false clock");
            return None;
        }
        let clock = FalseClock {
            library,
            offset: dir.join("clock"),
        };
        clock.jump(0);
        Some(clock)
    }

    pub(crate) fn env(&self) -> [(&'static str, String); 2] {
        [
            ("LD_PRELOAD", self.library.display().to_string()),
            ("WALL_CLOCK", self.offset.display().to_string()),
        ]
    }

    /// To so many seconds from the true time.
    pub(crate) fn jump(&self, seconds: i64) {
        // Written aside and renamed: nobody reads half a number.
        let aside = self.offset.with_extension("new");
        std::fs::write(&aside, seconds.to_string()).unwrap();
        std::fs::rename(aside, &self.offset).unwrap();
    }
}
