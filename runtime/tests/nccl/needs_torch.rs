//! The NCCL that comes with PyTorch, without a GPU: it is found, its functions are there, and what it says
//! reaches the caller. Nothing more is known of it here.

use std::path::PathBuf;
use std::process::Command;

use muster_runtime::collective::nccl::{Communicator, LEAST_VERSION, Library};

use super::support::*;

#[test]
fn the_real_library_loads_and_says_that_there_is_no_gpu() {
    let python = std::env::var("MUSTER_TEST_PYTHON").unwrap();
    let script = "import nvidia.nccl as n; print(list(n.__path__)[0] + '/lib/libnccl.so.2')";
    let output = Command::new(python).args(["-c", script]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let nccl = PathBuf::from(said.trim());
    if !nccl.exists() {
        println!("this PyTorch comes without NCCL: nothing to see");
        return;
    }
    let library = Library::load_from(&nccl, &standin()).unwrap();
    assert!(
        library.version() >= LEAST_VERSION,
        "{:?}",
        library.version()
    );
    println!("NCCL {}", library.version());
    let errors = on_ranks(
        1,
        "",
        |config| config,
        |mut rank| Communicator::form(&library, 0, &mut rank.group, config()).unwrap_err(),
    );
    // The stand-in's device is none to it.
    let said = errors[0].to_string();
    println!("{said}");
    assert!(!errors[0].passes(), "{said}");
    assert!(said.contains("cuda"), "{said}");
}
