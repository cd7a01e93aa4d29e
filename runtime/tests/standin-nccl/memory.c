/*
 * The stand-in's memory: what is allocated on devices, and what of the process's own they reach. It is as strict as the
 * driver at its strictest: an asynchronous copy to memory that is neither registered nor pinned is refused, and so is one
 * that goes beyond what it is about.
 */
#include "standin.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RANGES 4096

enum kind { NOTHING, DEVICE, REGISTERED, PINNED };

struct range {
	enum kind kind;
	char *at;
	size_t bytes;
	int device;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range ranges[RANGES];
static atomic_int lazy, lost, refuse_register, refuse_pinned, copies_left, copy_fails, copy_passes, passing;

int standin_lazy(void) { return atomic_load(&lazy); }
unsigned standin_lost(void) { return (unsigned)atomic_load(&lost); }
unsigned standin_said(void) { return standin_lost() ? standin_lost() : (unsigned)atomic_exchange(&passing, 0); }

void standin_cuda(const char *script)
{
	int code, number, at = 0;
	atomic_store(&lazy, strstr(script, "lazy") != NULL);
	atomic_store(&lost, 0);
	atomic_store(&refuse_register, 0);
	atomic_store(&refuse_pinned, 0);
	atomic_store(&copies_left, 0);
	atomic_store(&copy_passes, 0);
	atomic_store(&passing, 0);
	for (const char *entry = script; entry; entry = strchr(entry, ';')) {
		entry += *entry == ';';
		if (sscanf(entry, "register:%d%n", &code, &at) == 1) atomic_store(&refuse_register, code);
		else if (sscanf(entry, "pinned:%d%n", &code, &at) == 1) atomic_store(&refuse_pinned, code);
		else if (sscanf(entry, "copy:%d:%d%n", &number, &code, &at) == 2) {
			atomic_store(&copy_fails, code);
			atomic_store(&copies_left, number);
		} else if (sscanf(entry, "passing:%d:%d%n", &number, &code, &at) == 2) {
			atomic_store(&copy_fails, code);
			atomic_store(&copy_passes, 1);
			atomic_store(&copies_left, number);
		}
	}
}

/* Whether all of these bytes lie in one range of one of the kinds from `first` to `last`; that range. */
static int find(enum kind first, enum kind last, const void *at, size_t bytes, struct range *found)
{
	int is = 0;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < RANGES && !is; i++) {
		struct range *range = &ranges[i];
		size_t from = (size_t)((const char *)at - range->at);
		is = range->kind >= first && range->kind <= last && (const char *)at >= range->at && from <= range->bytes &&
		     bytes <= range->bytes - from && (bytes || from < range->bytes);
		if (is) *found = *range;
	}
	pthread_mutex_unlock(&lock);
	return is;
}

static unsigned add(enum kind kind, void *at, size_t bytes, int count)
{
	unsigned code = CUDA_OUT_OF_MEMORY;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < RANGES; i++)
		if (ranges[i].kind != NOTHING && ranges[i].at < (char *)at + bytes && (char *)at < ranges[i].at + ranges[i].bytes) {
			pthread_mutex_unlock(&lock);
			return CUDA_ALREADY_REGISTERED;
		}
	for (int i = 0; i < RANGES && code; i++)
		if (ranges[i].kind == NOTHING) {
			ranges[i] = (struct range){ kind, at, bytes, standin_device() };
			code = CUDA_OK;
		}
	pthread_mutex_unlock(&lock);
	if (!code) standin_count(count, 1);
	return code;
}

static unsigned drop(enum kind kind, void *at, int count)
{
	unsigned code = CUDA_NOT_REGISTERED;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < RANGES && code; i++)
		if (ranges[i].kind == kind && ranges[i].at == (char *)at) {
			/* It is still there: else this ends the process, and the test. */
			if (kind == REGISTERED) (void)*(volatile char *)at;
			ranges[i].kind = NOTHING;
			code = CUDA_OK;
		}
	pthread_mutex_unlock(&lock);
	if (!code) standin_count(count, -1);
	return code;
}

unsigned cuMemAlloc_v2(unsigned long long *address, size_t bytes)
{
	if (standin_device() < 0) return CUDA_INVALID_CONTEXT;
	if (!bytes) return CUDA_INVALID_VALUE;
	void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
	if (!memory) return CUDA_OUT_OF_MEMORY;
	unsigned code = add(DEVICE, memory, bytes, STANDIN_MEMORY);
	if (code) free(memory);
	else *address = (unsigned long long)(uintptr_t)memory;
	return code;
}

unsigned cuMemFree_v2(unsigned long long address)
{
	unsigned code = drop(DEVICE, (void *)(uintptr_t)address, STANDIN_MEMORY);
	if (!code) free((void *)(uintptr_t)address);
	return code;
}

unsigned cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags)
{
	(void)flags;
	if (standin_device() < 0) return CUDA_INVALID_CONTEXT;
	if (standin_lost()) return standin_lost();
	if (atomic_load(&refuse_register)) return (unsigned)atomic_load(&refuse_register);
	if (!bytes) return CUDA_INVALID_VALUE;
	return add(REGISTERED, at, bytes, STANDIN_REGISTERED);
}

unsigned cuMemHostUnregister(void *at)
{
	return standin_device() < 0 ? CUDA_INVALID_CONTEXT : drop(REGISTERED, at, STANDIN_REGISTERED);
}

unsigned cuMemHostAlloc(void **at, size_t bytes, unsigned flags)
{
	(void)flags;
	if (standin_device() < 0) return CUDA_INVALID_CONTEXT;
	if (standin_lost()) return standin_lost();
	if (atomic_load(&refuse_pinned)) return (unsigned)atomic_load(&refuse_pinned);
	void *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
	if (!memory) return CUDA_OUT_OF_MEMORY;
	unsigned code = add(PINNED, memory, bytes, STANDIN_PINNED);
	if (code) free(memory);
	else *at = memory;
	return code;
}

unsigned cuMemFreeHost(void *at)
{
	if (standin_device() < 0) return CUDA_INVALID_CONTEXT;
	unsigned code = drop(PINNED, at, STANDIN_PINNED);
	if (!code) free(at);
	return code;
}

unsigned cuPointerGetAttribute(void *value, int attribute, unsigned long long address)
{
	struct range range;
	if (!find(DEVICE, PINNED, (void *)(uintptr_t)address, 0, &range)) return CUDA_INVALID_VALUE;
	switch (attribute) {
	case 2: *(unsigned *)value = range.kind == DEVICE ? 2 : 1; return CUDA_OK;
	case 9: *(int *)value = range.device; return CUDA_OK;
	default: return CUDA_INVALID_VALUE;
	}
}

unsigned cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes)
{
	memcpy((void *)(uintptr_t)to, from, bytes);
	return CUDA_OK;
}

unsigned cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t bytes)
{
	memcpy(to, (const void *)(uintptr_t)from, bytes);
	return CUDA_OK;
}

struct copy {
	void *to;
	const void *from;
	size_t bytes;
	int byte;
};

/* On the device. */
static void copy(void *arg)
{
	struct copy *copy = arg;
	int fails = atomic_load(&copies_left) && atomic_fetch_sub(&copies_left, 1) == 1;
	if (fails) atomic_store(atomic_load(&copy_passes) ? &passing : &lost, atomic_load(&copy_fails));
	if (!fails && !standin_lost()) memcpy(copy->to, copy->from, copy->bytes);
	free(copy);
}

static void set(void *arg)
{
	struct copy *copy = arg;
	if (!standin_lost()) memset(copy->to, copy->byte, copy->bytes);
	free(copy);
}

static void send(void *stream, standin_fn *run, struct copy what)
{
	struct copy *task = malloc(sizeof *task);
	*task = what;
	if (stream) standin_enqueue(stream, run, task);
	else run(task);
}

void standin_set(void *stream, unsigned long long address, int byte, size_t bytes)
{
	send(stream, set, (struct copy){ (void *)(uintptr_t)address, NULL, bytes, byte });
}

unsigned cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t bytes, void *stream)
{
	struct range range, host;
	const void *source = (const void *)(uintptr_t)from;
	if (standin_lost()) return standin_lost();
	if (standin_device() != standin_stream_device(stream)) return CUDA_INVALID_CONTEXT;
	if (!find(DEVICE, DEVICE, source, bytes, &range) || range.device != standin_device()) return CUDA_INVALID_VALUE;
	if (!find(REGISTERED, PINNED, to, bytes, &host)) return CUDA_INVALID_VALUE;
	send(stream, copy, (struct copy){ to, source, bytes, 0 });
	return CUDA_OK;
}

unsigned cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t bytes, void *stream)
{
	struct range range;
	void *target = (void *)(uintptr_t)to;
	if (standin_lost()) return standin_lost();
	if (standin_device() != standin_stream_device(stream)) return CUDA_INVALID_CONTEXT;
	if (!find(DEVICE, DEVICE, target, bytes, &range) || range.device != standin_device()) return CUDA_INVALID_VALUE;
	send(stream, copy, (struct copy){ target, from, bytes, 0 });
	return CUDA_OK;
}
