/*
 * A stand-in for libnccl.so.2: ranks that are threads or processes of one host meet in a mapped file. It is as strict
 * and as unhelpful as NCCL with communicators that do not block: a call is only noted, and gets into the stream while
 * the communicator is asked for errors; a rank that is gone is waited for without end; a wrong use is refused, or
 * ends the process where NCCL would corrupt memory.
 */
#define _GNU_SOURCE
#include "standin.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS };

#define MAX_RANKS 16
#define SLOT ((size_t)4 << 20)
#define ALIVE 0x6c697665
#define DEAD 0x64656164
/* How often a communicator is asked before what was called is in the stream. */
#define POLLS 3

struct region {
	char script[512];
	atomic_int attached, arrived, round;
	size_t at[MAX_RANKS][MAX_RANKS], len[MAX_RANKS][MAX_RANKS];
	unsigned char slot[MAX_RANKS][SLOT];
};

typedef struct { char path[128]; } id;
typedef struct { size_t size; unsigned magic, version; int blocking; } config;

struct part {
	int send, peer;
	unsigned char *buffer;
	size_t bytes;
	struct part *next;
};

struct comm {
	int magic, rank, ranks, number;
	struct region *region;
	char path[128];
	pthread_mutex_t lock;
	int ready, polls;
	atomic_int error, aborted, queued, in_call;
	struct op *noted;
};

enum kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, PARTS };

struct op {
	struct comm *comm;
	enum kind kind;
	const void *from;
	void *to;
	size_t count;
	int type, reduction, root, number;
	struct part *parts;
	void *stream;
};

static __thread char script[512];
static __thread int depth;
static __thread struct part *grouped;
static __thread struct comm *group_comm;
static __thread void *group_stream;

static void die(const char *why)
{
	fprintf(stderr, "stand-in NCCL: %s\n", why);
	abort();
}

static struct comm *check(struct comm *comm)
{
	if (!comm || comm->magic != ALIVE) die("a communicator is used that is not there");
	return comm;
}

void standin_script(const char *text) { snprintf(script, sizeof script, "%s", text); }

static const char *own_script(void)
{
	const char *told = getenv("MUSTER_STANDIN_NCCL");
	return *script ? script : told ? told : "";
}

/* The argument of a fault, 0 if it has none, or -1 if there is no such fault here. */
static int fault(const char *in, const char *name, int rank, int number)
{
	char text[512], *save = NULL;
	snprintf(text, sizeof text, "%s", in);
	for (char *entry = strtok_r(text, ";", &save); entry; entry = strtok_r(NULL, ";", &save)) {
		char what[32] = "", who[8] = "-", when[8] = "-";
		int argument = 0;
		sscanf(entry, "%31[^:]:%7[^:]:%7[^:]:%d", what, who, when, &argument);
		if (!strcmp(what, name) && (*who == '-' || atoi(who) == rank) && (*when == '-' || atoi(when) == number))
			return argument;
	}
	return -1;
}

unsigned ncclGetVersion(int *version)
{
	int told = fault(own_script(), "version", 0, 0);
	*version = told < 0 ? 22809 : told;
	return OK;
}

const char *ncclGetErrorString(unsigned code)
{
	static const char *const texts[] = {
		"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument",
		"invalid usage", "remote process exited or there was a network error", "NCCL operation in progress",
	};
	return code < sizeof texts / sizeof *texts ? texts[code] : "unknown result code";
}

const char *ncclGetLastError(struct comm *comm) { (void)comm; return ""; }

unsigned ncclGetUniqueId(id *out)
{
	memset(out, 0, sizeof *out);
	strcpy(out->path, "/dev/shm/muster-standin-nccl-XXXXXX");
	int file = mkstemp(out->path);
	if (file < 0 || ftruncate(file, sizeof(struct region))) return SYSTEM_ERROR;
	/* The beginning of the region is its script. */
	const char *text = own_script();
	if (write(file, text, strlen(text)) < 0) return SYSTEM_ERROR;
	close(file);
	return OK;
}

unsigned ncclCommInitRankConfig(struct comm **out, int ranks, id id, int rank, config *config)
{
	if (config->magic != 0xcafebeef || config->size < sizeof *config || ranks > MAX_RANKS) return INVALID_ARGUMENT;
	if (config->blocking != 0) die("a communicator that blocks cannot be aborted");
	if (standin_device() < 0) return CUDA_ERROR;
	int file = open(id.path, O_RDWR);
	if (file < 0) return SYSTEM_ERROR;
	struct region *region = mmap(NULL, sizeof *region, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	close(file);
	if (region == MAP_FAILED) return SYSTEM_ERROR;
	while (fault(region->script, "init-stuck", rank, 0) >= 0)
		pause();
	struct comm *comm = calloc(1, sizeof *comm);
	*comm = (struct comm){ .magic = ALIVE, .rank = rank, .ranks = ranks, .region = region };
	memcpy(comm->path, id.path, sizeof comm->path);
	pthread_mutex_init(&comm->lock, NULL);
	atomic_store(&comm->error, IN_PROGRESS);
	if (fault(region->script, "init-hang", rank, 0) < 0) atomic_fetch_add(&region->attached, 1);
	standin_count(STANDIN_COMMS, 1);
	*out = comm;
	return IN_PROGRESS;
}

/* Waits for all ranks; false if aborted. */
static int meet(struct comm *comm)
{
	struct region *region = comm->region;
	int round = atomic_load(&region->round);
	if (atomic_fetch_add(&region->arrived, 1) + 1 == comm->ranks) {
		atomic_store(&region->arrived, 0);
		atomic_fetch_add(&region->round, 1);
		return 1;
	}
	while (atomic_load(&region->round) == round) {
		if (atomic_load(&comm->aborted)) return 0;
		usleep(20);
	}
	return 1;
}

static float of_bf16(uint16_t bits)
{
	uint32_t wide = (uint32_t)bits << 16;
	float value;
	memcpy(&value, &wide, 4);
	return value;
}

static uint16_t to_bf16(float value)
{
	uint32_t wide;
	memcpy(&wide, &value, 4);
	return (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

static float of_f16(uint16_t bits) { _Float16 value; memcpy(&value, &bits, 2); return (float)value; }
static uint16_t to_f16(float value) { _Float16 half = (_Float16)value; uint16_t bits; memcpy(&bits, &half, 2); return bits; }

/* In the order of ranks. Sums of integers wrap. */
#define FOLD(T, ACC, OF, TO, ADD)                                                                    \
	for (size_t i = 0; i < count; i++) {                                                         \
		ACC acc = OF(((const T *)(region->slot[0] + at))[i]);                                \
		for (int rank = 1; rank < ranks; rank++) {                                           \
			ACC next = OF(((const T *)(region->slot[rank] + at))[i]);                    \
			if (reduction == 2) acc = next > acc ? next : acc;                           \
			else if (reduction == 3) acc = next < acc ? next : acc;                      \
			else acc = (ACC)((ADD)acc + (ADD)next);                                      \
		}                                                                                    \
		((T *)to)[i] = TO(reduction == 4 ? (ACC)(acc / (ACC)ranks) : acc);                   \
	}                                                                                            \
	break;
#define SAME(x) (x)

static const size_t sizes[] = { 1, 1, 4, 4, 8, 8, 2, 4, 8, 2 };

static void reduce(struct region *region, int ranks, size_t at, size_t count, int type, int reduction, void *to)
{
	switch (type) {
	case 0: FOLD(int8_t, int8_t, SAME, SAME, uint8_t)
	case 1: FOLD(uint8_t, uint8_t, SAME, SAME, uint8_t)
	case 2: FOLD(int32_t, int32_t, SAME, SAME, uint32_t)
	case 3: FOLD(uint32_t, uint32_t, SAME, SAME, uint32_t)
	case 4: FOLD(int64_t, int64_t, SAME, SAME, uint64_t)
	case 5: FOLD(uint64_t, uint64_t, SAME, SAME, uint64_t)
	case 6: FOLD(uint16_t, float, of_f16, to_f16, float)
	case 7: FOLD(float, float, SAME, SAME, float)
	case 8: FOLD(double, double, SAME, SAME, double)
	case 9: FOLD(uint16_t, float, of_bf16, to_bf16, float)
	default: die("a type that was checked");
	}
}

static void wait_for_abort(struct comm *comm)
{
	while (!atomic_load(&comm->aborted))
		usleep(100);
}

static void work(struct op *op)
{
	struct comm *comm = op->comm;
	struct region *region = comm->region;
	int rank = comm->rank, ranks = comm->ranks, late, slow;
	size_t bytes = op->count * sizes[op->type];
	if (atomic_load(&comm->aborted)) return;
	if (fault(region->script, "hang", rank, op->number) >= 0) {
		wait_for_abort(comm);
		return;
	}
	if ((late = fault(region->script, "late", rank, op->number)) >= 0) {
		usleep(20000);
		atomic_store(&comm->error, late);
		wait_for_abort(comm);
		return;
	}
	if ((slow = fault(region->script, "slow", rank, op->number)) > 0) usleep((useconds_t)slow * 1000);
	size_t used = 0;
	if (op->kind == PARTS) {
		for (struct part *part = op->parts; part; part = part->next) {
			if (!part->send) continue;
			if (used + part->bytes > SLOT) die("parts that do not fit");
			memcpy(region->slot[rank] + used, part->buffer, part->bytes);
			region->at[rank][part->peer] = used;
			region->len[rank][part->peer] = part->bytes;
			used += part->bytes;
		}
	} else if (op->kind != BROADCAST || op->root == rank) {
		memcpy(region->slot[rank], op->from, op->kind == REDUCE_SCATTER ? bytes * (size_t)ranks : bytes);
	}
	if (!meet(comm)) return;
	switch (op->kind) {
	case ALL_REDUCE:
		reduce(region, ranks, 0, op->count, op->type, op->reduction, op->to);
		break;
	case REDUCE_SCATTER:
		reduce(region, ranks, bytes * (size_t)rank, op->count, op->type, op->reduction, op->to);
		break;
	case ALL_GATHER:
		for (int other = 0; other < ranks; other++)
			memcpy((char *)op->to + (size_t)other * bytes, region->slot[other], bytes);
		break;
	case BROADCAST:
		memcpy(op->to, region->slot[op->root], bytes);
		break;
	case PARTS:
		for (struct part *part = op->parts; part; part = part->next) {
			if (part->send) continue;
			if (region->len[part->peer][rank] != part->bytes) die("a part of another size");
			memcpy(part->buffer, region->slot[part->peer] + region->at[part->peer][rank], part->bytes);
		}
		break;
	}
	meet(comm);
}

static void drop(struct op *op)
{
	while (op->parts) {
		struct part *next = op->parts->next;
		free(op->parts);
		op->parts = next;
	}
	free(op);
}

static void run(void *arg)
{
	struct op *op = arg;
	struct comm *comm = op->comm;
	work(op);
	drop(op);
	atomic_fetch_sub(&comm->queued, 1);
}

/* Notes an operation. */
static unsigned note(struct op op)
{
	struct comm *comm = check(op.comm);
	if (atomic_fetch_add(&comm->in_call, 1)) die("two threads are in one communicator");
	unsigned code = IN_PROGRESS;
	struct region *region = comm->region;
	size_t bytes = op.count * sizes[op.type];
	int refuse = fault(region->script, "refuse", comm->rank, comm->number);
	op.number = comm->number;
	if (fault(region->script, "call-stuck", comm->rank, comm->number) >= 0) {
		wait_for_abort(comm);
		/* Whatever comes now is not the communicator's. */
		return INTERNAL_ERROR;
	}
	if (refuse > 0) code = (unsigned)refuse;
	else if (atomic_load(&comm->error) != OK) code = INVALID_ARGUMENT;
	else if (bytes * (op.kind == REDUCE_SCATTER ? (size_t)comm->ranks : 1) > SLOT) code = INVALID_ARGUMENT;
	if (code == IN_PROGRESS) {
		comm->number++;
		struct op *noted = malloc(sizeof *noted);
		*noted = op;
		pthread_mutex_lock(&comm->lock);
		comm->noted = noted;
		comm->polls = POLLS;
		atomic_store(&comm->error, IN_PROGRESS);
		pthread_mutex_unlock(&comm->lock);
	}
	atomic_fetch_sub(&comm->in_call, 1);
	return code;
}

unsigned ncclCommGetAsyncError(struct comm *comm, unsigned *error)
{
	check(comm);
	pthread_mutex_lock(&comm->lock);
	struct region *region = comm->region;
	if (!comm->ready) {
		int fails = fault(region->script, "init-fail", comm->rank, 0);
		if (fails > 0) {
			atomic_store(&comm->error, fails);
		} else if (atomic_load(&region->attached) == comm->ranks) {
			comm->ready = 1;
			atomic_store(&comm->error, OK);
			if (comm->rank == 0) unlink(comm->path);
		}
	} else if (comm->noted && --comm->polls == 0) {
		struct op *op = comm->noted;
		comm->noted = NULL;
		atomic_fetch_add(&comm->queued, 1);
		atomic_store(&comm->error, OK);
		standin_enqueue(op->stream, run, op);
	}
	*error = (unsigned)atomic_load(&comm->error);
	pthread_mutex_unlock(&comm->lock);
	return OK;
}

unsigned ncclCommAbort(struct comm *comm)
{
	check(comm);
	while (fault(comm->region->script, "abort-stuck", comm->rank, 0) >= 0)
		pause();
	atomic_store(&comm->aborted, 1);
	while (atomic_load(&comm->queued))
		usleep(50);
	/* A thread that is in a call sees the abort before the communicator is gone. */
	usleep(1000);
	if (!comm->ready && comm->rank == 0) unlink(comm->path);
	if (comm->noted) drop(comm->noted);
	munmap(comm->region, sizeof *comm->region);
	/* Kept, so that a later use is seen. */
	comm->magic = DEAD;
	standin_count(STANDIN_COMMS, -1);
	return OK;
}

unsigned ncclAllReduce(const void *from, void *to, size_t count, int type, int reduction, struct comm *comm, void *stream)
{
	return note((struct op){ .comm = comm, .kind = ALL_REDUCE, .from = from, .to = to, .count = count, .type = type,
				 .reduction = reduction, .stream = stream });
}

unsigned ncclReduceScatter(const void *from, void *to, size_t count, int type, int reduction, struct comm *comm, void *stream)
{
	return note((struct op){ .comm = comm, .kind = REDUCE_SCATTER, .from = from, .to = to, .count = count, .type = type,
				 .reduction = reduction, .stream = stream });
}

unsigned ncclAllGather(const void *from, void *to, size_t count, int type, struct comm *comm, void *stream)
{
	return note((struct op){ .comm = comm, .kind = ALL_GATHER, .from = from, .to = to, .count = count, .type = type,
				 .stream = stream });
}

unsigned ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct comm *comm, void *stream)
{
	return note((struct op){ .comm = comm, .kind = BROADCAST, .from = from, .to = to, .count = count, .type = type,
				 .root = root, .stream = stream });
}

unsigned ncclGroupStart(void) { depth++; return OK; }

static unsigned part(int send, void *buffer, size_t count, int type, int peer, struct comm *comm, void *stream)
{
	check(comm);
	if (!depth) die("send and receive outside a group wait for each other");
	struct part *part = malloc(sizeof *part);
	*part = (struct part){ send, peer, buffer, count * sizes[type], grouped };
	grouped = part;
	group_comm = comm;
	group_stream = stream;
	return OK;
}

unsigned ncclSend(const void *from, size_t count, int type, int peer, struct comm *comm, void *stream)
{
	return part(1, (void *)(uintptr_t)from, count, type, peer, comm, stream);
}

unsigned ncclRecv(void *to, size_t count, int type, int peer, struct comm *comm, void *stream)
{
	return part(0, to, count, type, peer, comm, stream);
}

unsigned ncclGroupEnd(void)
{
	if (!depth) return INVALID_USAGE;
	if (--depth || !grouped) return OK;
	struct op op = { .comm = group_comm, .kind = PARTS, .parts = grouped, .stream = group_stream };
	grouped = NULL;
	return note(op);
}
