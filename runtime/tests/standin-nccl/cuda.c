/*
 * A stand-in for libcuda.so.1: devices are numbers, device memory is the process's own, and each stream
 * is a thread that does one thing after the other. Only what Muster calls. Memory is in memory.c.
 */
#include "standin.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
	long number;
	struct task *next;
};

struct stream {
	pthread_mutex_t lock;
	pthread_cond_t more;
	struct task *first, **last;
	/* Tasks that were put in, that somebody waits for, and that are done. */
	long queued, wanted;
	atomic_long done;
	int closed, device;
};

struct event {
	atomic_long recorded, done;
	atomic_int holders;
	int device;
	/* Where it was recorded last. */
	struct stream *stream;
	long at;
};

static int may_run(struct stream *stream)
{
	return stream->first && (!standin_lazy() || stream->closed || stream->first->number <= stream->wanted);
}

static void *stream_main(void *arg)
{
	struct stream *stream = arg;
	for (;;) {
		pthread_mutex_lock(&stream->lock);
		while (!may_run(stream) && !stream->closed)
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
		atomic_store(&stream->done, task->number);
		free(task);
	}
}

/* Has everything up to this task done, however lazy the stream is. */
static void want(struct stream *stream, long number)
{
	pthread_mutex_lock(&stream->lock);
	if (stream->wanted < number) stream->wanted = number;
	pthread_cond_signal(&stream->more);
	pthread_mutex_unlock(&stream->lock);
}

int standin_stream_device(void *stream) { return stream ? ((struct stream *)stream)->device : standin_device(); }

void standin_enqueue(void *to, standin_fn *run, void *arg)
{
	struct stream *stream = to;
	struct task *task = malloc(sizeof *task);
	pthread_mutex_lock(&stream->lock);
	*task = (struct task){ run, arg, ++stream->queued, NULL };
	*stream->last = task;
	stream->last = &task->next;
	pthread_cond_signal(&stream->more);
	pthread_mutex_unlock(&stream->lock);
}

unsigned cuInit(unsigned flags) { return flags ? CUDA_INVALID_VALUE : CUDA_OK; }

unsigned cuGetErrorString(unsigned code, const char **text)
{
	switch (code) {
	case CUDA_OK: *text = "no error"; return CUDA_OK;
	case CUDA_INVALID_VALUE: *text = "invalid argument"; return CUDA_OK;
	case CUDA_OUT_OF_MEMORY: *text = "out of memory"; return CUDA_OK;
	case CUDA_INVALID_CONTEXT: *text = "invalid device context"; return CUDA_OK;
	case CUDA_ILLEGAL_ADDRESS: *text = "an illegal memory access was encountered"; return CUDA_OK;
	case CUDA_NOT_SUPPORTED: *text = "operation not supported"; return CUDA_OK;
	default: *text = NULL; return CUDA_INVALID_VALUE;
	}
}

unsigned cuDeviceGetCount(int *count) { *count = DEVICES; return CUDA_OK; }

unsigned cuDeviceGet(int *device, int ordinal)
{
	if (ordinal < 0 || ordinal >= DEVICES) return CUDA_NO_DEVICE;
	*device = ordinal;
	return CUDA_OK;
}

unsigned cuDeviceGetName(char *name, int len, int device)
{
	snprintf(name, (size_t)len, "stand-in %d", device);
	return CUDA_OK;
}

unsigned cuDeviceGetUuid_v2(char *uuid, int device)
{
	memset(uuid, 'S', 16);
	uuid[15] = (char)device;
	return CUDA_OK;
}

unsigned cuDeviceGetPCIBusId(char *bus, int len, int device)
{
	snprintf(bus, (size_t)len, "0000:%02x:00.0", device);
	return CUDA_OK;
}

unsigned cuDevicePrimaryCtxRetain(int **context, int device)
{
	*context = &contexts[device];
	standin_count(STANDIN_CONTEXTS, 1);
	return CUDA_OK;
}

unsigned cuDevicePrimaryCtxRelease_v2(int device)
{
	(void)device;
	standin_count(STANDIN_CONTEXTS, -1);
	return CUDA_OK;
}

unsigned cuCtxGetCurrent(int **context) { *context = current; return CUDA_OK; }
unsigned cuCtxSetCurrent(int *context) { current = context; return CUDA_OK; }

unsigned cuStreamCreate(struct stream **out, unsigned flags)
{
	(void)flags;
	if (!current) return CUDA_INVALID_CONTEXT;
	if (standin_lost()) return standin_lost();
	struct stream *stream = calloc(1, sizeof *stream);
	stream->device = standin_device();
	pthread_mutex_init(&stream->lock, NULL);
	pthread_cond_init(&stream->more, NULL);
	stream->last = &stream->first;
	pthread_t thread;
	if (pthread_create(&thread, NULL, stream_main, stream)) return CUDA_OUT_OF_MEMORY;
	pthread_detach(thread);
	standin_count(STANDIN_STREAMS, 1);
	*out = stream;
	return CUDA_OK;
}

/* As the real one, this returns at once; what is queued is still done. */
unsigned cuStreamDestroy_v2(struct stream *stream)
{
	pthread_mutex_lock(&stream->lock);
	stream->closed = 1;
	pthread_cond_signal(&stream->more);
	pthread_mutex_unlock(&stream->lock);
	return CUDA_OK;
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
	struct stream *stream;
	long at;
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
	if (standin_lazy() && mark->stream) want(mark->stream, mark->at);
	while (atomic_load(&mark->event->done) < mark->number)
		usleep(20);
	let_go(mark->event);
	free(mark);
}

static struct mark *mark(struct event *event)
{
	struct mark *mark = malloc(sizeof *mark);
	atomic_fetch_add(&event->holders, 1);
	*mark = (struct mark){ event, atomic_load(&event->recorded), event->stream, event->at };
	return mark;
}

unsigned cuEventCreate(struct event **out, unsigned flags)
{
	(void)flags;
	if (!current) return CUDA_INVALID_CONTEXT;
	struct event *event = calloc(1, sizeof *event);
	event->device = standin_device();
	atomic_store(&event->holders, 1);
	standin_count(STANDIN_EVENTS, 1);
	*out = event;
	return CUDA_OK;
}

unsigned cuEventRecord(struct event *event, struct stream *stream)
{
	if (standin_lost()) return standin_lost();
	if (event->device != standin_stream_device(stream)) return CUDA_INVALID_HANDLE;
	atomic_fetch_add(&event->recorded, 1);
	struct mark *here = mark(event);
	event->stream = stream;
	if (stream) {
		standin_enqueue(stream, pass, here);
		pthread_mutex_lock(&stream->lock);
		event->at = stream->queued;
		pthread_mutex_unlock(&stream->lock);
	} else {
		pass(here);
	}
	return CUDA_OK;
}

unsigned cuStreamWaitEvent(struct stream *stream, struct event *event, unsigned flags)
{
	if (flags) return CUDA_INVALID_VALUE;
	if (standin_lost()) return standin_lost();
	if (stream) standin_enqueue(stream, hold, mark(event));
	return CUDA_OK;
}

unsigned cuEventSynchronize(struct event *event)
{
	if (standin_lost()) return standin_lost();
	if (event->stream) want(event->stream, event->at);
	while (atomic_load(&event->done) < atomic_load(&event->recorded))
		usleep(20);
	return standin_said();
}

unsigned cuStreamSynchronize(struct stream *stream)
{
	if (!current) return CUDA_INVALID_CONTEXT;
	if (stream) {
		pthread_mutex_lock(&stream->lock);
		long all = stream->queued;
		pthread_mutex_unlock(&stream->lock);
		want(stream, all);
		while (atomic_load(&stream->done) < all)
			usleep(20);
	}
	return standin_said();
}

unsigned cuEventQuery(struct event *event)
{
	return atomic_load(&event->done) < atomic_load(&event->recorded) ? CUDA_NOT_READY : CUDA_OK;
}

unsigned cuEventDestroy_v2(struct event *event) { let_go(event); return CUDA_OK; }
