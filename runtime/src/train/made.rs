//! A model that may still be made, on a thread of its own, while its rank takes part already.

use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::panic::resume_unwind;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;

use super::config::{Config, TrainError};
use super::feed::Feed;
use super::model::{BoxError, Model};
use super::parallel::Parallel;
use super::tensors::Load;

/// Sizes of a model that have to be known before it is made ([`Parallel::later`](super::Parallel::later)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outline {
    /// [`Model::parameters`].
    pub parameters: usize,
    /// [`Model::buckets`].
    pub buckets: Vec<Range<usize>>,
    /// [`Model::extras`].
    pub extras: usize,
}

impl Outline {
    pub fn of(model: &impl Model) -> Outline {
        Outline {
            parameters: model.parameters(),
            buckets: model.buckets(),
            extras: model.extras(),
        }
    }
}

type Thread<M> = JoinHandle<Result<M, BoxError>>;

enum Making<M> {
    /// How the thread is started.
    Not(Box<dyn FnOnce() -> io::Result<Thread<M>> + Send>),
    Now(Thread<M>),
    /// There was no thread.
    Never(io::Error),
    Over,
}

/// A model whose users wait until it is made.
pub(super) struct Made<M> {
    model: OnceLock<M>,
    making: Mutex<Making<M>>,
}

impl<M> Made<M> {
    pub(super) fn already(model: M) -> Made<M> {
        Made {
            model: OnceLock::from(model),
            making: Mutex::new(Making::Over),
        }
    }

    /// Whether nobody has to wait for it.
    pub(super) fn is_done(&self) -> bool {
        match &*self.making() {
            Making::Not(_) => false,
            Making::Now(thread) => thread.is_finished(),
            Making::Never(_) | Making::Over => true,
        }
    }

    /// Has it made from now on.
    pub(super) fn start(&self) {
        let mut making = self.making();
        *making = match std::mem::replace(&mut *making, Making::Over) {
            Making::Not(start) => start().map_or_else(Making::Never, Making::Now),
            other => other,
        };
    }

    /// Waits until it is made.
    ///
    /// # Errors
    /// It cannot be made: told once.
    pub(super) fn wait(&self) -> Result<(), TrainError> {
        self.start();
        let making = std::mem::replace(&mut *self.making(), Making::Over);
        let thread = match making {
            Making::Now(thread) => thread,
            Making::Never(error) => return Err(TrainError::Thread(error)),
            Making::Not(_) | Making::Over => return Ok(()),
        };
        match thread.join() {
            Ok(Ok(model)) => {
                // Cannot be there yet: one thread makes it.
                let _new = self.model.set(model);
                Ok(())
            }
            Ok(Err(source)) => Err(TrainError::Make { source }),
            Err(panic) => resume_unwind(panic),
        }
    }

    /// It, if nobody has to wait for it, and it could be made.
    pub(super) fn get_mut(&mut self) -> Option<&mut M> {
        self.model.get_mut()
    }

    pub(super) fn into_inner(self) -> M {
        self.here();
        self.model.into_inner().unwrap_or_else(|| none())
    }

    fn here(&self) -> &M {
        if self.model.get().is_none() {
            // What nobody has asked for before is no less an end.
            if let Err(error) = self.wait() {
                resume_unwind(Box::new(error));
            }
        }
        self.model.get().unwrap_or_else(|| none())
    }

    fn making(&self) -> MutexGuard<'_, Making<M>> {
        self.making.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// It was told before that there is no model.
fn none() -> ! {
    resume_unwind(Box::new("the model was not made"))
}

impl<M: Model + Send + 'static> Parallel<M> {
    /// At the beginning of a training whose model `make` makes, on a thread of its own. In a job whose ranks train
    /// already they wait for a newcomer until it takes part, but not for its model: that is made from then on, while
    /// the others go on.
    ///
    /// # Errors
    /// As of [`new`](Self::new). That no model, or another one, is made ends the training later.
    pub fn later(
        outline: Outline,
        make: impl FnOnce() -> Result<M, BoxError> + Send + 'static,
        feed: Feed<M::Sample>,
        config: Config,
    ) -> Result<Parallel<M>, TrainError> {
        let model = Made::later(outline.clone(), make);
        Parallel::with(model, outline, feed, config)
    }
}

impl<M: Model + Send + 'static> Made<M> {
    /// By `make`, which has to make what the outline says.
    fn later(
        outline: Outline,
        make: impl FnOnce() -> Result<M, BoxError> + Send + 'static,
    ) -> Made<M> {
        let whole = move || {
            let mut model = make()?;
            let made = Outline::of(&model);
            if made != outline {
                return Err(format!("it is {made:?}, and {outline:?} was said of it").into());
            }
            // A copy comes into memory that is there. Models that name no tensors have no such memory.
            let _touched = model.load(&mut Load::touch());
            Ok(model)
        };
        let thread = std::thread::Builder::new().name("muster-model".into());
        let start = Box::new(move || thread.spawn(whole));
        Made {
            model: OnceLock::new(),
            making: Mutex::new(Making::Not(start)),
        }
    }
}

impl<M> Deref for Made<M> {
    type Target = M;

    fn deref(&self) -> &M {
        self.here()
    }
}

impl<M> DerefMut for Made<M> {
    fn deref_mut(&mut self) -> &mut M {
        self.here();
        self.model.get_mut().unwrap_or_else(|| none())
    }
}
