/*
 * A stand-in for libcuda.so.1: devices are numbers, device memory is the process's own, and each stream
 * is a thread that does one thing after the other. Only what Muster calls.
 */
#include "standin.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 101, INVALID_CONTEXT = 201, NOT_READY = 600 };

#define DEVICES 8

static int contexts[DEVICES];
static __thread int *current;
static atomic_int live[STANDIN_KINDS];

/* How many of a kind exist: what a test of leaks looks at. */
int standin_live(int kind) { return atomic_load(&live[kind]); }
void standin_count(int kind, int by) { atomic_fetch_add(&live[kind], by); }
int standin_device(void) { return current ? (int)(current - contexts) : -1; }

struct task {
	standin_fn *run;
	void *arg;
	struct task *next;
};

struct stream {
	pthread_mutex_t lock;
	pthread_cond_t more;
	struct task *first, **last;
	int closed;
};

struct event {
	atomic_long recorded, done;
	atomic_int holders;
};

static void *stream_main(void *arg)
{
	struct stream *stream = arg;
	for (;;) {
		pthread_mutex_lock(&stream->lock);
		while (!stream->first && !stream->closed)
			pthread_cond_wait(&stream->more, &stream->lock);
		struct task *task = stream->first;
		if (task && !(stream->first = task->next))
			stream->last = &stream->first;
		pthread_mutex_unlock(&stream->lock);
		if (!task) {
			free(stream);
			standin_count(STANDIN_STREAMS, -1);
			return NULL;
		}
		task->run(task->arg);
		free(task);
	}
}

void standin_enqueue(void *to, standin_fn *run, void *arg)
{
	struct stream *stream = to;
	struct task *task = malloc(sizeof *task);
	*task = (struct task){ run, arg, NULL };
	pthread_mutex_lock(&stream->lock);
	*stream->last = task;
	stream->last = &task->next;
	pthread_cond_signal(&stream->more);
	pthread_mutex_unlock(&stream->lock);
}

unsigned cuInit(unsigned flags) { return flags ? INVALID_VALUE : OK; }

unsigned cuGetErrorString(unsigned code, const char **text)
{
	switch (code) {
	case OK: *text = "no error"; return OK;
	case INVALID_VALUE: *text = "invalid argument"; return OK;
	case OUT_OF_MEMORY: *text = "out of memory"; return OK;
	case INVALID_CONTEXT: *text = "invalid device context"; return OK;
	default: *text = NULL; return INVALID_VALUE;
	}
}

unsigned cuDeviceGetCount(int *count) { *count = DEVICES; return OK; }

unsigned cuDeviceGet(int *device, int ordinal)
{
	if (ordinal < 0 || ordinal >= DEVICES) return NO_DEVICE;
	*device = ordinal;
	return OK;
}

unsigned cuDeviceGetName(char *name, int len, int device)
{
	snprintf(name, (size_t)len, "stand-in %d", device);
	return OK;
}

unsigned cuDeviceGetUuid_v2(char *uuid, int device)
{
	memset(uuid, 'S', 16);
	uuid[15] = (char)device;
	return OK;
}

unsigned cuDeviceGetPCIBusId(char *bus, int len, int device)
{
	snprintf(bus, (size_t)len, "0000:%02x:00.0", device);
	return OK;
}

unsigned cuDevicePrimaryCtxRetain(int **context, int device)
{
	*context = &contexts[device];
	standin_count(STANDIN_CONTEXTS, 1);
	return OK;
}

unsigned cuDevicePrimaryCtxRelease_v2(int device)
{
	(void)device;
	standin_count(STANDIN_CONTEXTS, -1);
	return OK;
}

unsigned cuCtxGetCurrent(int **context) { *context = current; return OK; }
unsigned cuCtxSetCurrent(int *context) { current = context; return OK; }

unsigned cuStreamCreate(struct stream **out, unsigned flags)
{
	(void)flags;
	if (!current) return INVALID_CONTEXT;
	struct stream *stream = calloc(1, sizeof *stream);
	pthread_mutex_init(&stream->lock, NULL);
	pthread_cond_init(&stream->more, NULL);
	stream->last = &stream->first;
	pthread_t thread;
	if (pthread_create(&thread, NULL, stream_main, stream)) return OUT_OF_MEMORY;
	pthread_detach(thread);
	standin_count(STANDIN_STREAMS, 1);
	*out = stream;
	return OK;
}

/* As the real one, this returns at once; what is queued is still done. */
unsigned cuStreamDestroy_v2(struct stream *stream)
{
	pthread_mutex_lock(&stream->lock);
	stream->closed = 1;
	pthread_cond_signal(&stream->more);
	pthread_mutex_unlock(&stream->lock);
	return OK;
}

static void let_go(struct event *event)
{
	if (atomic_fetch_sub(&event->holders, 1) == 1) {
		free(event);
		standin_count(STANDIN_EVENTS, -1);
	}
}

struct mark {
	struct event *event;
	long number;
};

static void pass(void *arg)
{
	struct mark *mark = arg;
	atomic_store(&mark->event->done, mark->number);
	let_go(mark->event);
	free(mark);
}

static void hold(void *arg)
{
	struct mark *mark = arg;
	while (atomic_load(&mark->event->done) < mark->number)
		usleep(20);
	let_go(mark->event);
	free(mark);
}

static struct mark *mark(struct event *event)
{
	struct mark *mark = malloc(sizeof *mark);
	atomic_fetch_add(&event->holders, 1);
	*mark = (struct mark){ event, atomic_load(&event->recorded) };
	return mark;
}

unsigned cuEventCreate(struct event **out, unsigned flags)
{
	(void)flags;
	if (!current) return INVALID_CONTEXT;
	struct event *event = calloc(1, sizeof *event);
	atomic_store(&event->holders, 1);
	standin_count(STANDIN_EVENTS, 1);
	*out = event;
	return OK;
}

unsigned cuEventRecord(struct event *event, struct stream *stream)
{
	atomic_fetch_add(&event->recorded, 1);
	struct mark *here = mark(event);
	if (stream) standin_enqueue(stream, pass, here);
	else pass(here);
	return OK;
}

unsigned cuStreamWaitEvent(struct stream *stream, struct event *event, unsigned flags)
{
	if (flags) return INVALID_VALUE;
	if (stream) standin_enqueue(stream, hold, mark(event));
	return OK;
}

unsigned cuEventQuery(struct event *event)
{
	return atomic_load(&event->done) < atomic_load(&event->recorded) ? NOT_READY : OK;
}

unsigned cuEventDestroy_v2(struct event *event) { let_go(event); return OK; }

unsigned cuMemAlloc_v2(unsigned long long *address, size_t bytes)
{
	if (!current) return INVALID_CONTEXT;
	if (!bytes) return INVALID_VALUE;
	void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
	if (!memory) return OUT_OF_MEMORY;
	standin_count(STANDIN_MEMORY, 1);
	*address = (unsigned long long)(uintptr_t)memory;
	return OK;
}

unsigned cuMemFree_v2(unsigned long long address)
{
	free((void *)(uintptr_t)address);
	standin_count(STANDIN_MEMORY, -1);
	return OK;
}

unsigned cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes)
{
	memcpy((void *)(uintptr_t)to, from, bytes);
	return OK;
}

unsigned cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t bytes)
{
	memcpy(to, (const void *)(uintptr_t)from, bytes);
	return OK;
}
