//! Names of objects: components of letters, digits and `-_.`, joined by `/`. Every store takes
//! them as they are, none means anything by them, and no component begins with a dot.

/// The most bytes of a component, and of a whole name.
const COMPONENT: usize = 200;
const WHOLE: usize = 512;

/// Whether an object may have this name.
pub(crate) fn is_name(name: &str) -> bool {
    let plain = |c: u8| c.is_ascii_alphanumeric() || b"-_.".contains(&c);
    name.len() <= WHOLE
        && name.split('/').all(|part| {
            (1..=COMPONENT).contains(&part.len())
                && !part.starts_with('.')
                && part.bytes().all(plain)
        })
}

/// `folder` and `name` joined; either may be empty.
pub(crate) fn join(folder: &str, name: &str) -> String {
    match (folder, name) {
        ("", name) => name.to_owned(),
        (folder, "") => folder.to_owned(),
        (folder, name) => format!("{folder}/{name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names() {
        for good in ["a", "job/log/00000001.json", "data/1-2-3/n0-0.safetensors"] {
            assert!(is_name(good), "{good}");
        }
        let long = "a".repeat(COMPONENT + 1);
        let deep = "abc/".repeat(WHOLE / 4) + "a";
        for bad in [
            "", "/", "/a", "a/", "a//b", ".", "a/..", ".a", "a b", "a%2Fb", "é", "a\0", &long,
            &deep,
        ] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
