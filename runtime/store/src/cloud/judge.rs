//! Meaning of a failed try: the kind of trouble, from what was seen on the wire.

use std::time::Duration;

use object_store::Error;

use super::wire::{Answer, Fault, Seen};
use crate::error::{Flavour, Kind};

/// A try that failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) kind: Kind,
    pub(crate) said: String,
    /// A request went out whose outcome this does not tell: it may have been, or may still be,
    /// carried out.
    pub(crate) open: bool,
    /// How long the store wants to be left alone.
    pub(crate) pause: Option<Duration>,
}

/// Meaning of a try's outcome. `None` as error: it took too long.
pub(crate) fn judge(flavour: Flavour, seen: &Seen, error: Option<&Error>) -> Failure {
    let (kind, said, open) = match (&seen.fault, &seen.answer, error) {
        (Some(fault), _, _) => of_fault(fault, seen),
        (None, _, None) => match seen.for_credentials {
            true => (Kind::Credentials, no_credentials("no answer"), seen.sent),
            false => (Kind::Timeout, String::new(), seen.sent),
        },
        (None, Some(answer), Some(error)) if answer.is_success() || answer.status == 304 => {
            match of_error(error) {
                Some(kind) => (kind, shorten(error), false),
                // It said that all went well, and what it sent with that is not understood.
                None if seen.for_credentials => (
                    Kind::Credentials,
                    no_credentials(&shorten(error)),
                    seen.sent,
                ),
                None => (Kind::Damaged, shorten(error), true),
            }
        }
        (None, Some(answer), Some(_)) if seen.for_credentials => {
            // Whoever gives credentials may be overloaded, too.
            let kind = match answer.status {
                429 => Kind::Throttled,
                500.. => Kind::Server,
                _ => Kind::Credentials,
            };
            (kind, no_credentials(&answer.said()), seen.sent)
        }
        (None, Some(answer), Some(_)) => {
            let kind = of_answer(flavour, answer);
            // What is refused was not done. A 409 may mean that another one is just doing it.
            let open = seen.sent && (answer.status >= 500 || matches!(answer.status, 408 | 409));
            (kind, answer.said(), open && answer.status != 501)
        }
        // Nothing was asked: credentials in a file, or a request that cannot be made.
        (None, None, Some(error)) => {
            let said = shorten(error);
            (
                of_error(error).unwrap_or(Kind::Credentials),
                said,
                seen.sent,
            )
        }
    };
    Failure {
        kind,
        said,
        open,
        pause: seen.answer.as_ref().and_then(|answer| answer.retry_after),
    }
}

fn of_fault(fault: &Fault, seen: &Seen) -> (Kind, String, bool) {
    let kind = match fault {
        Fault::Plain => Kind::Setup,
        Fault::Tls(_) => Kind::Setup,
        Fault::Connect(_) | Fault::Broken(_) => Kind::Network,
        Fault::Idle => Kind::Timeout,
        Fault::TooLarge => Kind::TooLarge,
    };
    let said = match fault {
        Fault::Plain => "plain HTTP, by which everybody on the way could read it".to_owned(),
        Fault::Tls(said) => format!("{said}: set SSL_CERT_FILE to the authority that signed it"),
        Fault::Connect(said) | Fault::Broken(said) => said.clone(),
        Fault::Idle => "nothing came or went".to_owned(),
        Fault::TooLarge => String::new(),
    };
    match seen.for_credentials {
        true => (Kind::Credentials, no_credentials(&said), seen.sent),
        false => (kind, said, seen.sent),
    }
}

fn no_credentials(why: &str) -> String {
    format!("asking for credentials failed: {why}")
}

fn of_answer(flavour: Flavour, answer: &Answer) -> Kind {
    let code = answer.code.as_deref().unwrap_or_default();
    match code {
        "NoSuchBucket" | "ContainerNotFound" | "ContainerBeingDeleted" => return Kind::NoBucket,
        "InvalidAccessKeyId"
        | "SignatureDoesNotMatch"
        | "ExpiredToken"
        | "InvalidToken"
        | "TokenRefreshRequired"
        | "AuthenticationFailed"
        | "InvalidAuthenticationInfo"
        | "NoAuthenticationInformation" => return Kind::Credentials,
        "RequestTimeTooSkewed" => return Kind::Clock,
        "AuthorizationHeaderMalformed"
        | "PermanentRedirect"
        | "IllegalLocationConstraintException" => {
            return Kind::Region;
        }
        "SlowDown" | "ServerBusy" | "TooManyRequests" | "RequestLimitExceeded" => {
            return Kind::Throttled;
        }
        "QuotaExceeded" | "InsufficientStorage" | "XMinioStorageFull" => return Kind::Full,
        "NotImplemented" => return Kind::Unsupported,
        "BadDigest"
        | "XAmzContentChecksumMismatch"
        | "Md5Mismatch"
        | "IncompleteBody"
        | "RequestTimeout" => return Kind::Damaged,
        "EntityTooLarge" | "RequestBodyTooLarge" => return Kind::Unsupported,
        _ => {}
    }
    match answer.status {
        301 | 307 | 308 if flavour == Flavour::S3 => Kind::Region,
        401 => Kind::Credentials,
        403 => Kind::Denied,
        404 => Kind::NotFound,
        405 | 501 => Kind::Unsupported,
        408 => Kind::Timeout,
        304 | 409 | 412 => Kind::Exists,
        416 => Kind::Short,
        429 | 503 => Kind::Throttled,
        507 => Kind::Full,
        500.. => Kind::Server,
        _ => Kind::Other,
    }
}

/// The kind of an error that object_store found by itself.
fn of_error(error: &Error) -> Option<Kind> {
    match error {
        Error::NotFound { .. } => Some(Kind::NotFound),
        Error::AlreadyExists { .. } | Error::Precondition { .. } | Error::NotModified { .. } => {
            Some(Kind::Exists)
        }
        Error::PermissionDenied { .. } => Some(Kind::Denied),
        Error::Unauthenticated { .. } => Some(Kind::Credentials),
        Error::NotSupported { .. } | Error::NotImplemented { .. } => Some(Kind::Unsupported),
        Error::InvalidPath { .. } => Some(Kind::Name),
        Error::UnknownConfigurationKey { .. } => Some(Kind::Setup),
        _ => None,
    }
}

/// An error in a line.
pub(crate) fn shorten(error: &Error) -> String {
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    error.to_string().chars().map(plain).take(300).collect()
}
