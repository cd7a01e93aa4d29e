//! Profiles of the AWS command line: `~/.aws/credentials` and `~/.aws/config`.
//!
//! Taken from a profile: keys, session token, region, endpoint, and a web identity. Profiles that
//! need a login, another profile or a program are refused with what to do instead.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

use crate::options::Variables;

/// The most bytes of one of these files.
const LIMIT: u64 = 1 << 20;

/// Contents of a profile.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Profile {
    pub(crate) key: Option<(String, String)>,
    pub(crate) token: Option<String>,
    pub(crate) region: Option<String>,
    pub(crate) endpoint: Option<String>,
    /// Token file and role.
    pub(crate) web_identity: Option<(String, String)>,
}

type Section = BTreeMap<String, String>;

/// The profile that the variables name, or the default one; none, where there are no such files.
/// With `keys_wanted` it is refused where it has credentials that only other programs can get.
pub(crate) fn profile(variables: &Variables, keys_wanted: bool) -> Result<Option<Profile>, String> {
    let named = variables
        .get("AWS_PROFILE")
        .or(variables.get("AWS_DEFAULT_PROFILE"));
    let name = named.unwrap_or("default");
    let place = |variable: &str, file: &str| match (variables.get(variable), variables.get("HOME"))
    {
        (Some(path), _) => Some(PathBuf::from(path)),
        (None, Some(home)) => Some(PathBuf::from(home).join(".aws").join(file)),
        (None, None) => None,
    };
    let credentials = place("AWS_SHARED_CREDENTIALS_FILE", "credentials");
    let config = place("AWS_CONFIG_FILE", "config");
    let mut found: Option<Section> = None;
    for (path, config) in [(config, true), (credentials, false)] {
        let Some(path) = path else { continue };
        let text = match read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => {
                return Err(format!("{} cannot be read: {error}", path.display()));
            }
        };
        if let Some(section) = section(&text, name, config) {
            // The credentials file comes second: its keys win.
            found.get_or_insert_default().extend(section);
        }
    }
    let Some(section) = found else {
        return match named {
            None => Ok(None),
            Some(name) => Err(format!(
                "AWS_PROFILE is {name}, and neither ~/.aws/credentials nor ~/.aws/config has such a profile"
            )),
        };
    };
    from(&section, name, keys_wanted).map(Some)
}

fn from(section: &Section, name: &str, keys_wanted: bool) -> Result<Profile, String> {
    let value = |key: &str| section.get(key).filter(|v| !v.is_empty()).cloned();
    let both = |a: &str, b: &str| value(a).zip(value(b));
    let profile = Profile {
        key: both("aws_access_key_id", "aws_secret_access_key"),
        token: value("aws_session_token"),
        region: value("region"),
        endpoint: value("endpoint_url"),
        web_identity: both("web_identity_token_file", "role_arn"),
    };
    if !keys_wanted || profile.key.is_some() || profile.web_identity.is_some() {
        return Ok(profile);
    }
    let other = [
        "sso_session",
        "sso_start_url",
        "credential_process",
        "source_profile",
        "credential_source",
        "role_arn",
    ];
    match other.iter().find(|key| section.contains_key(**key)) {
        None => Ok(profile),
        Some(key) => Err(format!(
            "the profile {name} gets its credentials by {key}, which Muster does not do: run eval \"$(aws configure export-credentials --profile {name} --format env)\" first"
        )),
    }
}

fn read(path: &PathBuf) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(LIMIT).read_to_string(&mut text)?;
    Ok(text)
}

/// A section of an INI file. Indented lines belong to nested settings, and are skipped.
fn section(text: &str, name: &str, config: bool) -> Option<Section> {
    let mut found: Option<Section> = None;
    let mut inside = false;
    for line in text.lines() {
        if line.starts_with([' ', '\t']) {
            continue;
        }
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        if let Some(head) = line.strip_prefix('[') {
            let head = head.split(']').next().unwrap_or_default().trim();
            let head = match head.split_once([' ', '\t']) {
                Some(("profile", rest)) if config => rest.trim().trim_matches('"'),
                // In the config file only the default profile has its bare name.
                None if !config || head == "default" => head,
                _ => "",
            };
            inside = head == name;
            if inside {
                found.get_or_insert_default();
            }
        } else if inside
            && let (Some((key, value)), Some(section)) = (line.split_once('='), &mut found)
        {
            let value = value.split(" #").next().unwrap_or_default();
            section.insert(key.trim().to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(credentials: &str, config: &str, more: &[(&str, &str)]) -> Result<Profile, String> {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join(".aws")).unwrap();
        std::fs::write(home.path().join(".aws/credentials"), credentials).unwrap();
        std::fs::write(home.path().join(".aws/config"), config).unwrap();
        let mut variables = vec![("HOME", home.path().to_str().unwrap())];
        variables.extend(more);
        profile(&variables.into_iter().collect(), true).map(Option::unwrap_or_default)
    }

    const CREDENTIALS: &str = "# mine\n[default]\naws_access_key_id = AK\naws_secret_access_key=S/K=\n\n[work]\naws_access_key_id=WK\naws_secret_access_key=WS\naws_session_token=WT\n";
    const CONFIG: &str = "[default]\nregion = eu-central-1\ns3 =\n  region = nested\n[profile work]\nregion=us-west-2 # there\nendpoint_url = https://s3.example\naws_access_key_id = old\n[work]\nregion = none\n[profile web]\nrole_arn = arn:role\nweb_identity_token_file = /var/token\n[profile sso]\nsso_session = corp\n";

    #[test]
    fn keys_regions_and_endpoints_come_from_both_files() {
        let default = at(CREDENTIALS, CONFIG, &[]).unwrap();
        assert_eq!(default.key, Some(("AK".into(), "S/K=".into())));
        assert_eq!(default.region.as_deref(), Some("eu-central-1"));
        assert_eq!((default.token, default.endpoint), (None, None));
        let work = at(CREDENTIALS, CONFIG, &[("AWS_PROFILE", "work")]).unwrap();
        assert_eq!(work.key, Some(("WK".into(), "WS".into())));
        assert_eq!(work.token.as_deref(), Some("WT"));
        assert_eq!(work.region.as_deref(), Some("us-west-2"));
        assert_eq!(work.endpoint.as_deref(), Some("https://s3.example"));
        let web = at(CREDENTIALS, CONFIG, &[("AWS_PROFILE", "web")]).unwrap();
        assert_eq!(
            web.web_identity,
            Some(("/var/token".into(), "arn:role".into()))
        );
    }

    #[test]
    fn what_cannot_be_had_is_told() {
        let missing = at(CREDENTIALS, CONFIG, &[("AWS_PROFILE", "none")])
            .err()
            .unwrap();
        assert!(missing.contains("AWS_PROFILE is none"), "{missing}");
        let sso = at(CREDENTIALS, CONFIG, &[("AWS_PROFILE", "sso")])
            .err()
            .unwrap();
        assert!(sso.contains("export-credentials --profile sso"), "{sso}");
        assert!(profile(&Variables::default(), true) == Ok(None));
    }
}
