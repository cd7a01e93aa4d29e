//! Clients of object_store, from a location and the environment.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue, Uri};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, Checksum};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::{ClientOptions, RetryConfig};

use super::Client;
use super::judge::shorten;
use super::transport::Connector;
use crate::error::Kind;
use crate::location::Location;
use crate::options::{ALLOW_HTTP, Options, Variables};
use crate::profile::{Profile, profile};

/// The smallest part that S3 takes, but for an upload's last one.
pub(super) const SMALLEST_PART: u64 = 5 << 20;

/// One that writes, and one that asks for checksums with what it reads.
type Clients = (Arc<dyn Client>, Arc<dyn Client>);
type Refused = (Kind, String);

pub(super) fn clients(location: &Location, options: &Options) -> Result<Clients, Refused> {
    match location {
        Location::S3 { bucket, .. } => s3(bucket, options),
        Location::Google { bucket, .. } => google(bucket, options),
        Location::Azure {
            account, container, ..
        } => azure(account.as_deref(), container, options),
        Location::Directory(_) => Err((Kind::Setup, "a directory is no cloud".to_owned())),
    }
}

fn setup(said: impl Into<String>) -> Refused {
    (Kind::Setup, said.into())
}

fn refused(error: object_store::Error) -> Refused {
    setup(shorten(&error))
}

/// Each request is sent once: trying again is this crate's.
fn once() -> RetryConfig {
    RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    }
}

/// An endpoint's host, and whether plain HTTP may be spoken with it.
fn endpoint(name: &str, url: &str, options: &Options) -> Result<(String, bool), Refused> {
    let uri: Option<Uri> = url.parse().ok();
    let host = uri
        .as_ref()
        .and_then(|uri| Some((uri.scheme_str()?, uri.host()?)));
    match host {
        Some(("https", host)) => Ok((host.to_owned(), false)),
        Some(("http", host)) if options.allow_http || is_loopback(host) => {
            Ok((host.to_owned(), true))
        }
        Some(("http", _)) => Err(setup(format!(
            "{name} is {url}, where everybody on the way could read and change what is stored: use https, or set {ALLOW_HTTP}=true if the network is your own"
        ))),
        _ => Err(setup(format!("{name} is {url}: write https://HOST:PORT"))),
    }
}

fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let address = bare.parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

fn client_options(plain: bool) -> ClientOptions {
    ClientOptions::new().with_allow_http(plain)
}

/// Variables that object_store knows by these names, but for those that Muster decides.
fn known<'v, K: std::str::FromStr + PartialEq>(
    variables: &'v Variables,
    prefix: &'v str,
    decided: &'v [&str],
) -> impl Iterator<Item = (K, &'v str)> {
    variables
        .beginning(prefix)
        .filter(|(name, _)| !decided.contains(name))
        .filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, value)))
}

fn s3(bucket: &str, options: &Options) -> Result<Clients, Refused> {
    let variables = &options.variables;
    let has = |name: &str| variables.get(name).is_some();
    let own_keys = has("AWS_ACCESS_KEY_ID") || has("AWS_SECRET_ACCESS_KEY");
    let own_identity = has("AWS_WEB_IDENTITY_TOKEN_FILE") && has("AWS_ROLE_ARN");
    let skip = variables.get("AWS_SKIP_SIGNATURE") == Some("true");
    let keys_wanted = !own_keys && !own_identity && !skip;
    let Profile {
        key,
        token,
        region: profile_region,
        endpoint: profile_endpoint,
        web_identity,
    } = match profile(variables, keys_wanted) {
        Ok(profile) => profile.unwrap_or_default(),
        Err(said) => return Err((Kind::Credentials, said)),
    };

    let mut builder = AmazonS3Builder::new();
    let decided = [
        "AWS_ALLOW_HTTP",
        "AWS_BUCKET",
        "AWS_BUCKET_NAME",
        "AWS_CHECKSUM_ALGORITHM",
        "AWS_CONDITIONAL_PUT",
        "AWS_COPY_IF_NOT_EXISTS",
        "AWS_S3_EXPRESS",
        "AWS_ENDPOINT",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
    ];
    for (key, value) in known::<AmazonS3ConfigKey>(variables, "AWS_", &decided) {
        builder = builder.with_config(key, value);
    }
    if keys_wanted {
        match (key, web_identity) {
            (Some((id, secret)), _) => {
                builder = builder
                    .with_access_key_id(id)
                    .with_secret_access_key(secret);
                if let Some(token) = token {
                    builder = builder.with_token(token);
                }
            }
            (None, Some((file, role))) => {
                builder = builder
                    .with_config(AmazonS3ConfigKey::WebIdentityTokenFile, file)
                    .with_config(AmazonS3ConfigKey::RoleArn, role);
            }
            (None, None) => {
                let elsewhere = has("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
                    || has("AWS_CONTAINER_CREDENTIALS_FULL_URI");
                if !elsewhere && variables.get("AWS_EC2_METADATA_DISABLED") == Some("true") {
                    return Err((Kind::Credentials, "there are none".to_owned()));
                }
            }
        }
    }
    let region = variables
        .get("AWS_REGION")
        .or(variables.get("AWS_DEFAULT_REGION"))
        .or(profile_region.as_deref())
        .unwrap_or("us-east-1")
        .to_owned();
    let own_endpoint = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"]
        .iter()
        .find_map(|name| Some((*name, variables.get(name)?)))
        .or(profile_endpoint.as_deref().map(|url| ("endpoint_url", url)));
    let (host, plain) = match own_endpoint {
        Some((name, url)) => {
            builder = builder.with_endpoint(url);
            endpoint(name, url, options)?
        }
        // A certificate for *.s3.amazonaws.com covers no name with dots.
        None if bucket.contains('.') => (format!("s3.{region}.amazonaws.com"), false),
        None => {
            builder = builder.with_virtual_hosted_style_request(true);
            (format!("{bucket}.s3.{region}.amazonaws.com"), false)
        }
    };
    let connector = connector(options, host, plain)?;
    builder = builder
        .with_bucket_name(bucket)
        .with_region(region)
        .with_retry(once())
        .with_disable_bulk_delete(true)
        .with_http_connector(connector);
    // TLS already protects what is sent; hashing it once more for the signature would cost more than
    // sending it.
    if !plain && !has("AWS_UNSIGNED_PAYLOAD") {
        builder = builder.with_unsigned_payload(true);
    }
    let checksums = variables.get("AWS_REQUEST_CHECKSUM_CALCULATION") != Some("when_required");
    if checksums {
        builder = builder.with_checksum_algorithm(Checksum::CRC64NVME);
    }
    let mut headers = HeaderMap::new();
    headers.insert(
        HeaderName::from_static("x-amz-checksum-mode"),
        HeaderValue::from_static("ENABLED"),
    );
    let reading = client_options(plain).with_default_headers(headers);
    let writer = builder.clone().with_client_options(client_options(plain));
    let reader = builder.with_client_options(reading);
    Ok((
        Arc::new(writer.build().map_err(refused)?),
        Arc::new(reader.build().map_err(refused)?),
    ))
}

fn google(bucket: &str, options: &Options) -> Result<Clients, Refused> {
    let variables = &options.variables;
    let decided = ["GOOGLE_BUCKET", "GOOGLE_BUCKET_NAME", "GOOGLE_ALLOW_HTTP"];
    let mut builder = GoogleCloudStorageBuilder::new();
    for (key, value) in known::<GoogleConfigKey>(variables, "GOOGLE_", &decided) {
        builder = builder.with_config(key, value);
    }
    let (host, plain) = match variables.get("GOOGLE_BASE_URL") {
        Some(url) => endpoint("GOOGLE_BASE_URL", url, options)?,
        None => ("storage.googleapis.com".to_owned(), false),
    };
    let client = builder
        .with_bucket_name(bucket)
        .with_retry(once())
        .with_client_options(client_options(plain))
        .with_http_connector(connector(options, host, plain)?)
        .build()
        .map_err(refused)?;
    let client = Arc::new(client);
    Ok((Arc::clone(&client) as _, client))
}

fn azure(account: Option<&str>, container: &str, options: &Options) -> Result<Clients, Refused> {
    let variables = &options.variables;
    let decided = [
        "AZURE_ALLOW_HTTP",
        "AZURE_CONTAINER_NAME",
        "AZURE_STORAGE_USE_EMULATOR",
    ];
    let mut builder = MicrosoftAzureBuilder::new();
    for (key, value) in known::<AzureConfigKey>(variables, "AZURE_", &decided) {
        builder = builder.with_config(key, value);
    }
    // The names that Azure's own tools use.
    let text = variables.get("AZURE_STORAGE_CONNECTION_STRING");
    let parts = text.unwrap_or_default().split(';');
    let said: Vec<(&str, &str)> = parts.filter_map(|part| part.split_once('=')).collect();
    let of = |name: &str| said.iter().find(|(key, _)| *key == name).map(|(_, v)| *v);
    let name = account
        .or(variables.get("AZURE_STORAGE_ACCOUNT"))
        .or(variables.get("AZURE_STORAGE_ACCOUNT_NAME"))
        .or(of("AccountName"));
    let Some(name) = name else {
        return Err(setup(
            "which storage account? Set AZURE_STORAGE_ACCOUNT, or write abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX",
        ));
    };
    builder = builder.with_account(name);
    if let Some(key) = variables.get("AZURE_STORAGE_KEY").or(of("AccountKey")) {
        builder = builder.with_access_key(key);
    }
    if let Some(token) = of("SharedAccessSignature") {
        builder = builder.with_config(AzureConfigKey::SasKey, token);
    }
    let own_endpoint = [
        "AZURE_STORAGE_ENDPOINT",
        "AZURE_STORAGE_SERVICE_ENDPOINT",
        "AZURE_ENDPOINT",
    ]
    .iter()
    .find_map(|name| Some((*name, variables.get(name)?)))
    .or(of("BlobEndpoint").map(|url| ("BlobEndpoint", url)));
    let (host, plain) = match own_endpoint {
        Some((variable, url)) => {
            builder = builder.with_endpoint(url.trim_end_matches('/').to_owned());
            endpoint(variable, url, options)?
        }
        None => (format!("{name}.blob.core.windows.net"), false),
    };
    let client = builder
        .with_container_name(container)
        .with_retry(once())
        .with_client_options(client_options(plain))
        .with_http_connector(connector(options, host, plain)?)
        .build()
        .map_err(refused)?;
    let client = Arc::new(client);
    Ok((Arc::clone(&client) as _, client))
}

fn connector(options: &Options, host: String, plain: bool) -> Result<Connector, Refused> {
    Connector::new(&options.variables, options.patience, vec![host], !plain).map_err(setup)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(location: &str, variables: &[(&str, &str)]) -> Refused {
        let location = location.parse().unwrap();
        let options = Options::new(variables.iter().copied().collect());
        clients(&location, &options).err().unwrap()
    }

    const KEYS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")];

    #[test]
    fn what_is_missing_is_told_without_a_request() {
        let disabled = [("AWS_EC2_METADATA_DISABLED", "true")];
        assert_eq!(refusal("s3://bucket", &disabled).0, Kind::Credentials);
        let half = [("AWS_ACCESS_KEY_ID", "a")];
        assert_eq!(refusal("s3://bucket", &half).0, Kind::Setup);
        let (kind, said) = refusal("az://box/x", &[]);
        assert_eq!(kind, Kind::Setup);
        assert!(said.contains("AZURE_STORAGE_ACCOUNT"), "{said}");
    }

    #[test]
    fn plain_http_is_for_this_machine_unless_it_is_asked_for() {
        let with = |url: &'static str| {
            let mut variables = KEYS.to_vec();
            variables.push(("AWS_ENDPOINT_URL", url));
            variables
        };
        let (kind, said) = refusal("s3://bucket", &with("http://minio.example:9000"));
        assert_eq!(kind, Kind::Setup);
        assert!(said.contains("use https"), "{said}");
        assert_eq!(refusal("s3://bucket", &with("minio:9000")).0, Kind::Setup);
        let location: Location = "s3://bucket".parse().unwrap();
        for url in [
            "http://127.0.0.1:9000",
            "http://[::1]:9000",
            "http://localhost:1",
        ] {
            let options = Options::new(with(url).into_iter().collect());
            assert!(clients(&location, &options).is_ok(), "{url}");
        }
        let mut options = Options::new(with("http://minio.example:9000").into_iter().collect());
        options.allow_http = true;
        assert!(clients(&location, &options).is_ok());
    }

    #[test]
    fn azure_takes_the_names_of_its_own_tools() {
        let location: Location = "az://box/x".parse().unwrap();
        let key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
        let connection = format!(
            "DefaultEndpointsProtocol=http;AccountName=dev;AccountKey={key};BlobEndpoint=http://127.0.0.1:1/dev;"
        );
        for variables in [
            vec![("AZURE_STORAGE_CONNECTION_STRING", connection.as_str())],
            vec![
                ("AZURE_STORAGE_ACCOUNT", "dev"),
                ("AZURE_STORAGE_KEY", key),
                ("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:1/dev"),
            ],
        ] {
            let options = Options::new(variables.into_iter().collect());
            if let Err((kind, said)) = clients(&location, &options) {
                panic!("{kind:?} {said}");
            }
        }
    }
}
