//! Where samples come from.

use std::time::{Duration, Instant};

use super::model::BoxError;
use crate::data::{LoadError, Loader, LoaderConfig, Microbatch, Sampler};
use crate::live::Share;

/// A data set's samples, by their index.
pub struct Feed<S>(Source<S>);

type Load<S> = Box<dyn FnMut(u64) -> Result<S, BoxError> + Send>;

enum Source<S> {
    Direct(Load<S>),
    Ahead(Loader<S>),
}

impl<S> std::fmt::Debug for Feed<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match &self.0 {
            Source::Direct(_) => "Feed::direct",
            Source::Ahead(_) => "Feed::ahead",
        })
    }
}

impl Feed<u64> {
    /// Nothing is to be loaded: a sample is its own index, and the model has the data in memory.
    pub fn indices() -> Feed<u64> {
        Feed::direct(Ok)
    }
}

impl<S: Send + 'static> Feed<S> {
    /// Loads a sample when it is needed, in the training's own thread.
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

    /// This rank's microbatches of the step that comes next, and how long that took.
    pub(super) fn step(
        &mut self,
        sampler: &Sampler,
        share: &Share,
    ) -> Result<(Vec<Microbatch<S>>, Duration), LoadError> {
        let load = match &mut self.0 {
            Source::Ahead(loader) => {
                let loaded = loader.step(sampler, share)?;
                return Ok((loaded.microbatches, loaded.waited));
            }
            Source::Direct(load) => load,
        };
        let began = Instant::now();
        let plan = sampler.plan(share.entered.len());
        let mut microbatches = Vec::new();
        for number in plan.part(share) {
            let samples = plan
                .indices(number)
                .map(|index| load(index).map_err(|source| LoadError::Sample { index, source }))
                .collect::<Result<_, _>>()?;
            microbatches.push(Microbatch { number, samples });
        }
        Ok((microbatches, began.elapsed()))
    }
}
