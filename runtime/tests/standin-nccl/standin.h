/* What the stand-ins for CUDA and NCCL share with each other and with the tests. */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum { STANDIN_CONTEXTS, STANDIN_STREAMS, STANDIN_EVENTS, STANDIN_MEMORY, STANDIN_COMMS, STANDIN_KINDS };

typedef void standin_fn(void *);

int standin_live(int kind);
void standin_count(int kind, int by);
/* The device of the calling thread; -1 if it has none. */
int standin_device(void);
/* Puts something into a stream. */
void standin_enqueue(void *stream, standin_fn *run, void *arg);
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
