/* The C ABI of Muster's runtime, libmuster.so: the agreed stop step, checkpoints by slots, the elastic sampler.
 *
 * A function that can fail returns a number of `muster_code`: 0 is success, positive ones are no errors, of negative
 * ones `muster_error` has the text, which names the fix. No function exits the process, installs a signal handler or
 * unwinds into its caller. A handle may be used from any thread; calls on one handle wait for each other, and nothing
 * else may use it while it is closed. Text is UTF-8 that ends with a zero byte. A pointer to nothing may be NULL.
 *
 * python/muster.py is this for Python, and its example: docs/python.md.
 */
#ifndef MUSTER_H
#define MUSTER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes with everything below that does not fit what was compiled before. */
#define MUSTER_ABI 2u

/* `muster_tensor.rank`: every rank holds the same. */
#define MUSTER_ALL_RANKS 0xffffffffu

/* Bytes of a sampler's state. */
#define MUSTER_SAMPLER_STATE 40

enum muster_code {
  MUSTER_OK = 0,
  MUSTER_NOTHING = 1,       /* not started by Muster; nothing to restore; no such blob; a save left out */
  MUSTER_ARGUMENT = -1,     /* an argument makes no sense */
  MUSTER_ENVIRONMENT = -2,  /* the variables, or the control page behind them, cannot be used */
  MUSTER_STEP = -3,         /* steps go up, by themselves */
  MUSTER_UNDECIDED = -4,    /* a stop was announced and not decided in time; the step was not begun: save, and fail */
  MUSTER_NO_STORE = -5,     /* the job was started without --store */
  MUSTER_BUSY = -6,         /* both slots are still being written */
  MUSTER_SAVE = -7,         /* nothing was saved; the next save may succeed */
  MUSTER_PLAN = -8,         /* what the ranks hold does not make up the tensors */
  MUSTER_RESTORE = -9,      /* the checkpoint cannot be read now, or not on this node */
  MUSTER_MISMATCH = -10,    /* the checkpoint has not what is wanted: the model was changed */
  MUSTER_DAMAGED = -11,     /* the checkpoint is damaged, for every node */
  MUSTER_PANIC = -12        /* a mistake of this library */
};

/* This library's ABI, to be compared with MUSTER_ABI; its release, if `release` is not NULL. */
uint32_t muster_abi(const char **release);

/* Why the last call of this thread that failed did. Valid until this thread's next one fails. Never NULL. */
const char *muster_error(void);

/* ---- the job ---- */

typedef struct muster_job muster_job;

typedef struct muster_place {
  uint32_t rank;
  uint32_t world;
  uint32_t local_rank;
  uint32_t local_world;
  uint64_t generation;
  uint64_t restart;
} muster_place;

/* Attaches to the launcher that started this process; from then on a stop is agreed on by steps, not by a signal.
 * `abi` is MUSTER_ABI: a library of another one refuses (MUSTER_ENVIRONMENT). MUSTER_NOTHING, and `*job` is NULL: not
 * started by Muster. `place` is filled in either case. */
int32_t muster_open(uint32_t abi, muster_job **job, muster_place *place);

/* Detaches. NULL is nothing. What is sealed stays. */
void muster_close(muster_job *job);

enum muster_action { MUSTER_CONTINUE = 0, MUSTER_CHECKPOINT = 1, MUSTER_STOP = 2 };

typedef struct muster_directive {
  int32_t action;      /* muster_action */
  uint32_t reason;     /* 0 unknown, 1 preemption, 2 drain, 3 terminated, 4 join, 5 interrupted, 6 checkpoint */
  uint64_t deadline;   /* of a stop: milliseconds since 1970; 0: none */
} muster_directive;

/* Announces that `step` is about to begin, and asks whether it may: two accesses to memory, unless a stop is being
 * agreed on. MUSTER_CHECKPOINT: save, say `muster_done`, begin it. MUSTER_STOP: do not begin it; save, say
 * `muster_done`, exit with 0. All ranks get the same answer at the same step. */
int32_t muster_step(muster_job *job, uint64_t step, muster_directive *directive);

/* What `muster_step` asked for (MUSTER_CHECKPOINT or MUSTER_STOP) is done. */
int32_t muster_done(muster_job *job, uint64_t step, int32_t action);

/* Instead of that: MUSTER_CHECKPOINT could not be done, and why. The training may go on; who ordered it
 * (`muster checkpoint`) is told. */
int32_t muster_failed(muster_job *job, uint64_t step, const char *why);

/* How this rank trains, for /metrics. What is not known is NaN, or 0 where a number is whole. */
typedef struct muster_metrics {
  uint64_t steps;                /* that this process has done */
  double training_loss;
  double samples_per_second;     /* of this rank: the sum over ranks is the job's */
  double learning_rate;
  double loss_scale;
  double data_seconds;           /* since the process began, as all that follow */
  double compute_seconds;
  double communication_seconds;
  double gradient_sync_seconds;
} muster_metrics;

/* NULL: only a sign of life, of a rank that is long inside a step and not hung. */
int32_t muster_report(muster_job *job, const muster_metrics *metrics);

/* ---- saving ---- */

/* A tensor, or a box of it that is contiguous in memory, in C order, little-endian. */
typedef struct muster_tensor {
  const char *name;
  const char *dtype;         /* as safetensors names it: BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 U16 I16 F16 BF16 U32 I32 F32 U64 I64 F64 C64 */
  uint32_t dims;             /* at most 32 */
  uint32_t rank;             /* who holds it, or MUSTER_ALL_RANKS */
  const uint64_t *shape;     /* of the whole tensor, in elements */
  const uint64_t *offset;    /* NULL, both: the whole tensor */
  const uint64_t *extent;
} muster_tensor;

enum muster_memory_kind {
  MUSTER_HOST = 0,           /* of this process */
  MUSTER_CUDA = 1            /* of one of NVIDIA's GPUs */
};

/* A tensor's memory. Fill it with zeros first. The driver, libcuda.so.1 or the file that MUSTER_CUDA_LIBRARY names, is
 * loaded when a tensor of a GPU is saved or loaded for the first time. */
typedef struct muster_memory {
  void *at;                  /* only read by muster_save */
  uint32_t kind;             /* muster_memory_kind */
  uint32_t reserved;         /* 0 */
  void *stream;              /* of a GPU: the CUstream or cudaStream_t in which it is worked with, and which is waited
                              * for; NULL is the default stream. Of the primary context, as is the memory. */
} muster_memory;

/* What all ranks hold: the same list on every rank. What several hold is written by one of them, so plain data-parallel
 * state (MUSTER_ALL_RANKS) needs no word between ranks; of sharded state, gather what each rank has first. Asks the launcher for two slots. It makes
 * them in the background, a second or so for each gigabyte: the first muster_save waits for the rest of that. `wants[i]` becomes the sum of what is wanted of the i-th, muster_wants. May be called
 * again when the state has changed its shape. Ranks that declare other lists save without an error, and such a save is
 * given up: nothing of it is committed, and people are told which ranks differ. */
int32_t muster_declare(muster_job *job, const muster_tensor *tensors, size_t count, uint8_t *wants);

enum muster_wants {
  MUSTER_WRITES = 1,         /* this rank will write something of it: muster_save */
  MUSTER_LOOKS = 2           /* its beginning is compared between ranks: muster_look */
};

#define MUSTER_LOOK 4096u

/* Has the beginnings of some tensors compared that several ranks say they hold alike; a save for which they differ is given
 * up. Before each muster_save, on all ranks or on none. first[i]: the first MUSTER_LOOK bytes of the i-th tensor, or all if
 * it has fewer, in C order, in this process's memory, also for a tensor of a GPU; NULL: it is not looked at. Only those with
 * MUSTER_LOOKS are. Hashes 256 KiB at most. */
int32_t muster_look(muster_job *job, const uint8_t *const *first, size_t count);

/* Has done, in the background, what the first save of tensors on GPUs would do first: both slots are registered with the
 * driver, which takes a while for large ones. `data` is that of muster_save; it is only looked at for where it is. Need not
 * be called, and does nothing where no tensor is on a GPU. What goes wrong here goes wrong in the save again, and is
 * told there. */
int32_t muster_prepare(muster_job *job, const muster_memory *data, size_t count);

typedef struct muster_blob {
  const char *name;          /* unique over all ranks: rng/3 */
  const uint8_t *data;
  size_t bytes;
} muster_blob;

typedef struct muster_saved {
  uint64_t bytes;            /* that this rank copied */
  double copied;             /* seconds */
  double waited;             /* seconds before, for a slot */
} muster_saved;

/* Copies this rank's part of the state before `step` into a slot and seals it: from then on it does not depend on this
 * process. `data[i]` is the memory of the i-th tensor that was declared, and is not looked at where writes[i] is 0. What
 * is on a GPU is copied by it, straight into the slot where the driver allows that, and sealed when that is done.
 * All ranks save the same steps, each higher than the one before. Waits up to `wait` seconds for a slot.
 * MUSTER_NOTHING: both are busy, and the job was started to leave such saves out. */
int32_t muster_save(muster_job *job, uint64_t step, const muster_memory *data, size_t count, const muster_blob *blobs,
                    size_t blob_count, double wait, muster_saved *saved);

/* ---- restoring ---- */

typedef struct muster_restore muster_restore;

typedef struct muster_origin {
  uint64_t step;             /* that its state has not begun yet */
  uint32_t world;            /* ranks that saved it */
  uint32_t reserved;
  size_t tensors;
} muster_origin;

/* What this worker's generation begins with, the same on all ranks. MUSTER_NOTHING, and `*restore` is NULL: nothing. */
int32_t muster_restore_open(muster_restore **restore, muster_origin *origin);

/* The i-th tensor, ascending by name, whole; its pointers are valid until the checkpoint is closed. */
int32_t muster_restore_tensor(const muster_restore *restore, size_t i, muster_tensor *tensor);

/* A blob, valid until the checkpoint is closed. */
int32_t muster_restore_blob(const muster_restore *restore, const char *name, const uint8_t **data, size_t *bytes);

/* Fills `into[i]`, exactly the bytes of the i-th tensor or box, in any slicing; reads no more than that needs and
 * verifies all of it. No two may overlap in memory. What is on a GPU is there when this returns, for any stream. After
 * an error their content is undefined. */
int32_t muster_restore_load(const muster_restore *restore, const muster_tensor *tensors, const muster_memory *into,
                            size_t count);

void muster_restore_close(muster_restore *restore);

/* ---- the elastic sampler ---- */

typedef struct muster_sampler muster_sampler;

typedef struct muster_sampler_config {
  uint64_t samples;          /* indices are 0 to samples, exclusive */
  uint64_t seed;
  uint64_t batch;            /* samples of a step */
  uint64_t epoch;            /* where it begins, unless there is a state */
  uint32_t per_rank;         /* 0: over all ranks, whatever the world; 1: for each rank */
  uint32_t drop_tail;        /* 1: an epoch's last samples, fewer than a batch, are left out of it */
} muster_sampler_config;

typedef struct muster_batch {
  uint64_t epoch;
  uint64_t samples;          /* over all ranks */
  size_t count;              /* of this rank */
} muster_batch;

/* A cursor over shuffled epochs, at the beginning of one or where `state` (MUSTER_SAMPLER_STATE bytes) was. */
int32_t muster_sampler_open(muster_sampler **sampler, const muster_sampler_config *config, const uint8_t *state);

/* The next batch: the indices of this rank's part go to `into`, and the cursor moves past it. MUSTER_ARGUMENT, and it
 * stays, if there are more than `room`. */
int32_t muster_sampler_next(muster_sampler *sampler, uint32_t rank, uint32_t world, uint64_t *into, size_t room,
                            muster_batch *batch);

/* Where it is: its state, the epoch, and how many samples of that are behind it. */
int32_t muster_sampler_state(const muster_sampler *sampler, uint8_t *state, uint64_t *epoch, uint64_t *position);

void muster_sampler_close(muster_sampler *sampler);

#ifdef __cplusplus
}
#endif
#endif
