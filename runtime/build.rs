//! Builds the C++ shim of the feature `torch`. Without the feature there is nothing to build.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "torch")]
    torch::build();
}

#[cfg(feature = "torch")]
mod torch {
    use std::path::PathBuf;

    pub(super) fn build() {
        println!("cargo:rerun-if-changed=src/torch/shim.cpp");
        println!("cargo:rerun-if-env-changed=DEP_TCH_LIBTORCH_LIB");
        // torch-sys says where it found libtorch; the headers are beside the libraries.
        let Some(lib) = std::env::var_os("DEP_TCH_LIBTORCH_LIB").map(PathBuf::from) else {
            println!(
                "cargo::error=torch-sys does not say where libtorch is; set LIBTORCH_USE_PYTORCH=1 or LIBTORCH (docs/torch.md)"
            );
            return;
        };
        let include = lib.with_file_name("include");
        cc::Build::new()
            .cpp(true)
            .pic(true)
            .std("c++17")
            .opt_level(1)
            .debug(false)
            // They are libtorch's own, in its headers.
            .warnings(false)
            .include(&include)
            .include(include.join("torch/csrc/api/include"))
            .file("src/torch/shim.cpp")
            .compile("muster_torch_shim");
        // The tests and examples of this package find libtorch by themselves.
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
    }
}
