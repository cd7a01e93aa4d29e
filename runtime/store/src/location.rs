//! Where a store is, as its user writes it.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// A place for checkpoints and a job's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A directory of this machine, or one that several machines have mounted.
    Directory(PathBuf),
    /// `s3://bucket/prefix`: Amazon S3, or whatever `AWS_ENDPOINT_URL` names that speaks its protocol.
    S3 { bucket: String, prefix: String },
    /// `gs://bucket/prefix`: Google Cloud Storage.
    Google { bucket: String, prefix: String },
    /// `az://container/prefix`, or `abfss://container@account.dfs.core.windows.net/prefix`: Azure
    /// Blob Storage. Without an account here, the environment names it.
    Azure {
        account: Option<String>,
        container: String,
        prefix: String,
    },
}

/// Why a text names no store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LocationError {
    #[error("the store's location is empty: give a directory or s3://BUCKET/PREFIX")]
    Empty,
    #[error(
        "`{0}`: stores are directories, file://, s3://, gs://, az:// and abfss://; for a server of your own that speaks S3 give s3://BUCKET/PREFIX and set AWS_ENDPOINT_URL to its address"
    )]
    Scheme(String),
    #[error("`{text}` lacks slashes: write {scheme}://{rest}")]
    Slashes {
        text: String,
        scheme: String,
        rest: String,
    },
    #[error("`{0}`: write file:/// and an absolute path, or the path alone")]
    File(String),
    #[error(
        "`{0}` holds a password or key: take it out, and set it in the environment (docs/stores.md)"
    )]
    Secret(String),
    #[error("`{0}`: parameters after ? or # are not understood; set options in the environment")]
    Parameters(String),
    #[error(
        "`{name}` cannot be the name of a {what}: 3 to 63 lower-case letters, digits, dots, hyphens{underscore}"
    )]
    Bucket {
        what: &'static str,
        name: String,
        underscore: &'static str,
    },
    #[error(
        "`{0}` is an S3 directory bucket, which does not list its objects in order: use a general purpose bucket"
    )]
    DirectoryBucket(String),
    #[error(
        "`{0}` in the prefix: its parts consist of letters, digits and - _ . = + @ , and none is empty or begins with a dot"
    )]
    Prefix(String),
    #[error(
        "`{0}`: write abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX, or az://CONTAINER/PREFIX with AZURE_STORAGE_ACCOUNT set"
    )]
    Account(String),
}

const SCHEMES: [&str; 7] = ["file", "s3", "s3a", "gs", "az", "abfs", "abfss"];

impl Location {
    /// Whether it is anything but a directory.
    pub fn is_cloud(&self) -> bool {
        !matches!(self, Self::Directory(_))
    }

    /// The place that this folder lies in, and its name there; `None` of what lies in nothing.
    pub fn split(&self) -> Option<(Location, String)> {
        let mut above = self.clone();
        let last = match &mut above {
            Self::Directory(path) => {
                let last = path.file_name()?.to_str()?.to_owned();
                path.pop();
                last
            }
            Self::S3 { prefix, .. } | Self::Google { prefix, .. } | Self::Azure { prefix, .. } => {
                let cut = prefix.rfind('/');
                let last = prefix.split_off(cut.map_or(0, |at| at + 1));
                prefix.truncate(cut.unwrap_or(0));
                last
            }
        };
        (!last.is_empty()).then_some((above, last))
    }
}

impl FromStr for Location {
    type Err = LocationError;

    fn from_str(text: &str) -> Result<Self, LocationError> {
        let text = text.trim();
        if text.is_empty() {
            return Err(LocationError::Empty);
        }
        let named = |(scheme, _): &(&str, &str)| {
            let plain = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
            scheme.starts_with(|c: char| c.is_ascii_alphabetic()) && scheme.chars().all(plain)
        };
        let Some((scheme, rest)) = text.split_once("://").filter(named) else {
            if let Some((scheme, rest)) = text.split_once(':')
                && SCHEMES.contains(&scheme.to_ascii_lowercase().as_str())
            {
                return Err(LocationError::Slashes {
                    text: text.to_owned(),
                    scheme: scheme.to_ascii_lowercase(),
                    rest: rest.trim_start_matches('/').to_owned(),
                });
            }
            return Ok(Self::Directory(PathBuf::from(text)));
        };
        let scheme = scheme.to_ascii_lowercase();
        if scheme == "file" {
            return match rest.starts_with('/') && !rest.contains('%') {
                true => Ok(Self::Directory(PathBuf::from(rest))),
                false => Err(LocationError::File(text.to_owned())),
            };
        }
        if !SCHEMES.contains(&scheme.as_str()) {
            return Err(LocationError::Scheme(scheme));
        }
        if rest.contains(['?', '#']) {
            let shown = text.split(['?', '#']).next().unwrap_or_default();
            return Err(LocationError::Parameters(shown.to_owned()));
        }
        let (authority, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix_of(prefix)?;
        match scheme.as_str() {
            "s3" | "s3a" => {
                no_secret(&scheme, authority)?;
                let bucket = bucket("bucket", authority, ".-", "")?;
                if bucket.ends_with("--x-s3") {
                    return Err(LocationError::DirectoryBucket(bucket));
                }
                Ok(Self::S3 { bucket, prefix })
            }
            "gs" => {
                no_secret(&scheme, authority)?;
                let bucket = bucket("bucket", authority, ".-_", ", underscores")?;
                Ok(Self::Google { bucket, prefix })
            }
            _ => azure(text, authority, prefix),
        }
    }
}

fn azure(text: &str, authority: &str, prefix: String) -> Result<Location, LocationError> {
    let (container, account) = match authority.split_once('@') {
        None if text.starts_with("ab") => return Err(LocationError::Account(text.to_owned())),
        None => (authority, None),
        Some((container, host)) => {
            if container.contains(':') {
                return Err(LocationError::Secret("az://".to_owned() + "…@" + host));
            }
            let account = host
                .strip_suffix(".dfs.core.windows.net")
                .or_else(|| host.strip_suffix(".blob.core.windows.net"))
                .filter(|name| {
                    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
                    (3..=24).contains(&name.len()) && name.chars().all(plain)
                });
            let Some(account) = account else {
                return Err(LocationError::Account(text.to_owned()));
            };
            (container, Some(account.to_owned()))
        }
    };
    Ok(Location::Azure {
        account,
        container: bucket("container", container, "-", "")?,
        prefix,
    })
}

fn no_secret(scheme: &str, authority: &str) -> Result<(), LocationError> {
    match authority.rsplit_once('@') {
        None => Ok(()),
        Some((_, host)) => Err(LocationError::Secret(format!("{scheme}://…@{host}"))),
    }
}

fn bucket(
    what: &'static str,
    name: &str,
    also: &str,
    underscore: &'static str,
) -> Result<String, LocationError> {
    let fine = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || also.contains(c);
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    if (3..=63).contains(&name.len())
        && name.chars().all(fine)
        && ends(name.chars().next())
        && ends(name.chars().next_back())
        && !name.contains("..")
    {
        return Ok(name.to_owned());
    }
    Err(LocationError::Bucket {
        what,
        name: name.to_owned(),
        underscore,
    })
}

/// Without slashes at its ends.
fn prefix_of(text: &str) -> Result<String, LocationError> {
    let text = text.trim_end_matches('/');
    let fine = |c: char| c.is_ascii_alphanumeric() || "-_.=+@,".contains(c);
    for part in text.split('/') {
        let empty = part.is_empty() && !text.is_empty();
        if empty || part.starts_with('.') || !part.chars().all(fine) || text.len() > 512 {
            return Err(LocationError::Prefix(part.chars().take(80).collect()));
        }
    }
    Ok(text.to_owned())
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, authority, prefix) = match self {
            Self::Directory(path) => return write!(f, "{}", path.display()),
            Self::S3 { bucket, prefix } => ("s3", bucket.clone(), prefix),
            Self::Google { bucket, prefix } => ("gs", bucket.clone(), prefix),
            Self::Azure {
                account: None,
                container,
                prefix,
            } => ("az", container.clone(), prefix),
            Self::Azure {
                account: Some(account),
                container,
                prefix,
            } => {
                let authority = format!("{container}@{account}.dfs.core.windows.net");
                ("abfss", authority, prefix)
            }
        };
        match prefix.as_str() {
            "" => write!(f, "{scheme}://{authority}"),
            prefix => write!(f, "{scheme}://{authority}/{prefix}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<Location, LocationError> {
        text.parse()
    }

    fn s3(bucket: &str, prefix: &str) -> Location {
        Location::S3 {
            bucket: bucket.into(),
            prefix: prefix.into(),
        }
    }

    #[test]
    fn what_users_write() {
        let directory = |path: &str| Location::Directory(path.into());
        let azure = |account: Option<&str>, container: &str, prefix: &str| Location::Azure {
            account: account.map(Into::into),
            container: container.into(),
            prefix: prefix.into(),
        };
        for (text, location) in [
            ("/shared/jobs", directory("/shared/jobs")),
            ("jobs", directory("jobs")),
            ("file:///shared/jobs", directory("/shared/jobs")),
            ("a:b/c", directory("a:b/c")),
            ("s3://my-bucket", s3("my-bucket", "")),
            ("S3://my-bucket/", s3("my-bucket", "")),
            (
                " s3a://my.bucket/team/run=1/ ",
                s3("my.bucket", "team/run=1"),
            ),
            (
                "gs://my_bucket/x",
                Location::Google {
                    bucket: "my_bucket".into(),
                    prefix: "x".into(),
                },
            ),
            ("az://box/x", azure(None, "box", "x")),
            (
                "abfss://box@acc1.dfs.core.windows.net/x/y",
                azure(Some("acc1"), "box", "x/y"),
            ),
        ] {
            assert_eq!(parse(text).as_ref(), Ok(&location), "{text}");
            assert_eq!(parse(&location.to_string()), Ok(location), "{text}");
        }
    }

    #[test]
    fn what_is_wrong_is_told_with_its_fix() {
        for (text, fix) in [
            ("", "give a directory"),
            ("https://minio:9000/b", "set AWS_ENDPOINT_URL"),
            ("s3:bucket/x", "write s3://bucket/x"),
            ("s3:/bucket", "write s3://bucket"),
            ("file://host/x", "file:///"),
            ("s3://key:secret@bucket/x", "in the environment"),
            ("s3://bucket/x?region=eu", "in the environment"),
            ("s3://Bucket/x", "lower-case"),
            ("s3://ab", "3 to 63"),
            ("s3://bucket/a//b", "none is empty"),
            ("s3://bucket/../b", "begins with a dot"),
            ("s3://bucket/a%2Fb", "consist of letters"),
            ("s3://fast--use1-az4--x-s3/a", "general purpose"),
            ("az://a_b/x", "container"),
            ("abfss://box/x", "CONTAINER@ACCOUNT"),
            ("abfss://box@evil.example/x", "CONTAINER@ACCOUNT"),
            ("az://box:key@acc.blob.core.windows.net/x", "take it out"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.to_string().contains(fix), "{text}: {error}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }

    #[test]
    fn a_folder_lies_in_a_place() {
        for (folder, above, last) in [
            ("/shared/jobs/train", "/shared/jobs", "train"),
            ("/train", "/", "train"),
            ("s3://bucket/team/train", "s3://bucket/team", "train"),
            ("gs://bucket/train", "gs://bucket", "train"),
            ("az://box/a/b/train", "az://box/a/b", "train"),
        ] {
            let split = parse(folder).unwrap().split();
            assert_eq!(split, Some((parse(above).unwrap(), last.to_owned())));
        }
        for place in ["/", "s3://bucket", "az://box/"] {
            assert_eq!(parse(place).unwrap().split(), None, "{place}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics_and_what_parses_parses_again(text in "(s3|gs|az|abfss|file|x)?(://)?[a-z.@:/?%0-9-]{0,40}") {
            if let Ok(location) = parse(&text) {
                prop_assert_eq!(parse(&location.to_string()), Ok(location));
            }
        }
    }
}
