//! Where samples come from.

use super::model::BoxError;
use crate::data::{LoadError, Loader, LoaderConfig};

/// Samples by their index.
pub struct Feed<S>(pub(super) Source<S>);

pub(super) enum Source<S> {
    /// In the calling thread, when they are needed.
    Direct(Box<dyn FnMut(u64) -> Result<S, BoxError> + Send>),
    /// By threads, ahead of time.
    Ahead(Loader<S>),
}

impl<S> std::fmt::Debug for Feed<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match &self.0 {
            Source::Direct(_) => "Feed::Direct",
            Source::Ahead(_) => "Feed::Ahead",
        })
    }
}

impl<S: Send + 'static> Feed<S> {
    /// Loads a sample when it is needed, in the training's own thread. For data in memory:
    /// `Feed::direct(|index| Ok(index))`, and the model looks there.
    pub fn direct(load: impl FnMut(u64) -> Result<S, BoxError> + Send + 'static) -> Feed<S> {
        Feed(Source::Direct(Box::new(load)))
    }

    /// Loads samples ahead of time: see [`Loader`].
    ///
    /// # Errors
    /// No thread can be started.
    pub fn ahead(
        config: LoaderConfig,
        load: impl Fn(u64) -> Result<S, BoxError> + Send + Sync + 'static,
    ) -> Result<Feed<S>, LoadError> {
        Ok(Feed(Source::Ahead(Loader::new(config, load)?)))
    }
}
