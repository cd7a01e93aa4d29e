/* What the stand-ins for CUDA and NCCL share with each other and with the tests. */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum {
	STANDIN_CONTEXTS,
	STANDIN_STREAMS,
	STANDIN_EVENTS,
	STANDIN_MEMORY,
	STANDIN_COMMS,
	STANDIN_REGISTERED,
	STANDIN_PINNED,
	STANDIN_KINDS
};
enum {
	CUDA_OK = 0,
	CUDA_INVALID_VALUE = 1,
	CUDA_OUT_OF_MEMORY = 2,
	CUDA_NO_DEVICE = 101,
	CUDA_INVALID_CONTEXT = 201,
	CUDA_INVALID_HANDLE = 400,
	CUDA_NOT_READY = 600,
	CUDA_ILLEGAL_ADDRESS = 700,
	CUDA_ALREADY_REGISTERED = 712,
	CUDA_NOT_REGISTERED = 713,
	CUDA_NOT_SUPPORTED = 801
};

typedef void standin_fn(void *);

int standin_live(int kind);
void standin_count(int kind, int by);
/* The device of the calling thread; -1 if it has none. */
int standin_device(void);
/* Puts something into a stream. */
void standin_enqueue(void *stream, standin_fn *run, void *arg);
/* The device of a stream; that of the calling thread for the default one. */
int standin_stream_device(void *stream);
/* Why the driver does nothing any more: an error in a stream has lost the context. */
unsigned standin_lost(void);
/* The same, or an error that nobody was told of yet: it is said once, to whoever waits next. */
unsigned standin_said(void);
/*
 * What the driver does from now on, separated by semicolons; nothing: as it should, and nothing is lost any more.
 *   lazy               what is in a stream is done only when somebody waits for it, here or by another stream
 *   register:CODE      cuMemHostRegister fails
 *   pinned:CODE        cuMemHostAlloc fails
 *   copy:N:CODE        the N-th asynchronous copy from now on fails on the device, and the context is lost
 *   passing:N:CODE     it fails, and the context is not lost
 */
void standin_cuda(const char *script);
int standin_lazy(void);
/* A kernel: sets so many bytes of a device's memory, in a stream. */
void standin_set(void *stream, unsigned long long address, int byte, size_t bytes);
/*
 * The faults of the communicators whose id this thread makes: entries `name:rank:operation:argument`, separated by
 * semicolons, the last two left out where they mean nothing. By default $MUSTER_STANDIN_NCCL.
 *   version:-:-:CODE   what ncclGetVersion says
 *   hang:R:N           rank R never begins its operation N
 *   late:R:N:CODE      as hang, and NCCL then reports CODE
 *   refuse:R:N:CODE    the call itself fails
 *   call-stuck:R:N     the call returns only when the communicator is aborted
 *   slow:R:N:MS        rank R begins so much later
 *   init-hang:R        rank R never gets ready
 *   init-stuck:R       the making of the communicator never returns at rank R
 *   init-fail:R:-:CODE it fails
 *   abort-stuck:R      the abort never returns at rank R
 */
void standin_script(const char *script);
