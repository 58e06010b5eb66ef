// What the native libraries of torch_rbln 0.12.0 link to, as far as their tensors need it: device
// memory is host memory that nobody else knows of, copies are memcpy, everything is done at once.
// Names and signatures are those that their wheel asks the linker for (`nm -D --undefined-only`).
// Streams, events, profiler and the collectives of the device say "done" and do nothing.

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

using Address = unsigned long;
using Copies = std::vector<std::tuple<unsigned long, unsigned long, unsigned long>>;

namespace {

constexpr int kDone = 0;
constexpr int kFailed = 1;
// The answer for what this driver does not know, which the callers take as "ask elsewhere".
constexpr int kUnsupported = 3;
// Fresh device memory holds anything: NaN in every float format. Not all of a large pool, which
// would make its pages real.
constexpr int kGarbage = 0xFF;
constexpr unsigned long kGarbageBytes = 256ul << 20;

unsigned long setting(const char *name, unsigned long otherwise) {
    const char *text = std::getenv(name);
    return text && *text ? std::strtoul(text, nullptr, 10) : otherwise;
}

struct Memory {
    std::mutex lock;
    std::map<Address, unsigned long> sizes;
    unsigned long taken = 0;
    unsigned long limit = setting("SDK_DOUBLE_MEMORY", 140ul << 30);

    int take(unsigned long size, Address &address) {
        std::lock_guard<std::mutex> held(lock);
        const unsigned long bytes = size ? size : 1;
        if (taken + bytes > limit) return kFailed;
        void *found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found == MAP_FAILED) return kFailed;
        std::memset(found, kGarbage, bytes < kGarbageBytes ? bytes : kGarbageBytes);
        address = reinterpret_cast<Address>(found);
        sizes[address] = bytes;
        taken += bytes;
        return kDone;
    }

    int give_back(Address address) {
        std::lock_guard<std::mutex> held(lock);
        const auto found = sizes.find(address);
        if (found == sizes.end()) return kFailed;
        munmap(reinterpret_cast<void *>(address), found->second);
        taken -= found->second;
        sizes.erase(found);
        return kDone;
    }

    int zero(Address address) {
        std::lock_guard<std::mutex> held(lock);
        const auto found = sizes.find(address);
        if (found == sizes.end()) return kFailed;
        // Fresh pages are zero, and cost nothing until they are read.
        void *at = reinterpret_cast<void *>(address);
        return madvise(at, found->second, MADV_DONTNEED) == 0 ? kDone : kFailed;
    }
};

Memory &memory() {
    static Memory *one = new Memory;  // outlives every thread that frees at exit
    return *one;
}

int copy(unsigned long from, unsigned long to, unsigned long size) {
    std::memmove(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), size);
    return kDone;
}

int copy_all(const Copies &copies) {
    for (const auto &[from, to, size] : copies) copy(from, to, size);
    return kDone;
}

}  // namespace

// ------------------------------------------------------------------------------------ the C names

struct Properties {
    char name[32];
    unsigned long total_memory;
};

extern "C" {

bool rbln_runtime_available() { return true; }

int rbln_get_device_count(int *count) {
    const char *npu = std::getenv("SDK_DOUBLE_NPU");
    const bool none = npu && !*npu;
    const char *visible = std::getenv("RBLN_VISIBLE_DEVICES");
    int found = static_cast<int>(setting("SDK_DOUBLE_DEVICES", 4));
    if (visible) {
        found = *visible ? 1 : 0;
        for (const char *at = visible; *at; ++at) found += *at == ',';
    }
    *count = none ? 0 : found;
    return kDone;
}

int rbln_get_device_properties(int, Properties *properties) {
    const char *npu = std::getenv("SDK_DOUBLE_NPU");
    std::memset(properties, 0, sizeof *properties);
    std::strncpy(properties->name, npu && *npu ? npu : "RBLN-CR13", sizeof properties->name - 1);
    properties->total_memory = memory().limit;
    return kDone;
}

int rbln_get_device_memory_info(int, void *) { return kUnsupported; }

// Not asked for numbers here: the answer is success, or nothing to tell.
#define SAYS_DONE(name) \
    int name() { return kDone; }
SAYS_DONE(rbln_empty_cache)
SAYS_DONE(rbln_kineto_begin_session)
SAYS_DONE(rbln_kineto_end_session_and_export)
SAYS_DONE(rbln_kineto_is_active)
SAYS_DONE(rbln_prof_get_host_sync_d2h)
SAYS_DONE(rbln_prof_get_host_sync_h2d)
SAYS_DONE(rbln_prof_get_memory)
SAYS_DONE(rbln_prof_get_v2v_hidden_d2h)
SAYS_DONE(rbln_prof_get_v2v_reject)
SAYS_DONE(rbln_prof_reset_host_sync_d2h)
SAYS_DONE(rbln_prof_reset_host_sync_h2d)
SAYS_DONE(rbln_prof_reset_v2v_hidden_d2h)
SAYS_DONE(rbln_prof_reset_v2v_reject)
SAYS_DONE(rbln_prof_v2v_hidden_num_reasons)
SAYS_DONE(rbln_prof_v2v_reject_num_reasons)
SAYS_DONE(rbln_register_device_id)
SAYS_DONE(rbln_reset_accumulated_memory_stats)
SAYS_DONE(rbln_reset_peak_memory_stats)
SAYS_DONE(rbln_rt_prepare_inputs)
SAYS_DONE(rbln_rt_prepare_outputs)
SAYS_DONE(rbln_rt_run)
}

// -------------------------------------------------------------------------------- memory statistics

// Sixteen numbers, as large as the room that the callers make for it.
namespace rbln {
struct MemoryStats {
    unsigned long numbers[16] = {};
    ~MemoryStats() {}
#define IS_ZERO(name) unsigned long name() const;
    IS_ZERO(GetActiveCurrent)
    IS_ZERO(GetActivePeak)
    IS_ZERO(GetAllocatedCurrent)
    IS_ZERO(GetAllocatedPeak)
    IS_ZERO(GetAllocatedTotalAllocated)
    IS_ZERO(GetAllocatedTotalFreed)
    IS_ZERO(GetCachedCurrent)
    IS_ZERO(GetCachedPeak)
    IS_ZERO(GetNumAllocRetries)
    IS_ZERO(GetNumDeviceAlloc)
    IS_ZERO(GetNumDeviceFree)
    IS_ZERO(GetNumOoms)
    IS_ZERO(GetReservedCurrent)
    IS_ZERO(GetReservedPeak)
    IS_ZERO(GetReservedTotalAllocated)
    IS_ZERO(GetReservedTotalFreed)
#undef IS_ZERO
    std::map<std::string, unsigned long> GetMemoryStats() const;
};

#define IS_ZERO(name) \
    unsigned long MemoryStats::name() const { return 0; }
IS_ZERO(GetActiveCurrent)
IS_ZERO(GetActivePeak)
IS_ZERO(GetAllocatedCurrent)
IS_ZERO(GetAllocatedPeak)
IS_ZERO(GetAllocatedTotalAllocated)
IS_ZERO(GetAllocatedTotalFreed)
IS_ZERO(GetCachedCurrent)
IS_ZERO(GetCachedPeak)
IS_ZERO(GetNumAllocRetries)
IS_ZERO(GetNumDeviceAlloc)
IS_ZERO(GetNumDeviceFree)
IS_ZERO(GetNumOoms)
IS_ZERO(GetReservedCurrent)
IS_ZERO(GetReservedPeak)
IS_ZERO(GetReservedTotalAllocated)
IS_ZERO(GetReservedTotalFreed)

std::map<std::string, unsigned long> MemoryStats::GetMemoryStats() const { return {}; }
}  // namespace rbln

rbln::MemoryStats rbln_get_memory_stats(int) { return {}; }
std::vector<rbln::MemoryStats> rbln_get_memory_stats_per_chiplet(int) { return {}; }

// ------------------------------------------------------------------------------- memory and copies

namespace rbln {

struct MemoryInfo;
enum class DataType : int;

int rbln_malloc_lazy(unsigned, unsigned long size, Address &address) {
    return memory().take(size, address);
}
int rbln_malloc_eager(unsigned, unsigned long size, Address &address) {
    return memory().take(size, address);
}
int rbln_free(Address address) { return memory().give_back(address); }
int rbln_mark_zeros(Address address) { return memory().zero(address); }

int rbln_get_torch_device_id_from_vaddr(Address, unsigned &device) {
    device = 0;  // a rank has one
    return kDone;
}
int rbln_get_memory_info(Address, MemoryInfo &) { return kUnsupported; }
int rbln_set_memory_info(Address, DataType, DataType, const std::vector<long> &) { return kDone; }
int rbln_set_raw_memory_alloc(Address, unsigned long) { return kDone; }
int rbln_set_device_alloc_layout_like(Address, Address) { return kDone; }

// A host pointer to device memory, for operators that run on the CPU: here it is the memory itself.
int rbln_v_borrow_host_ptr(Address at, unsigned long, unsigned long &pointer,
                           unsigned long &borrowed) {
    pointer = borrowed = at;
    return kDone;
}
int rbln_v_acquire_host_ptr_for_overwrite(Address at, unsigned long, unsigned long &pointer,
                                          unsigned long &borrowed) {
    pointer = borrowed = at;
    return kDone;
}
int rbln_v_return_borrowed(unsigned long, bool) { return kDone; }

int rbln_memcpy_h2v(unsigned long from, unsigned long to, unsigned long size) {
    return copy(from, to, size);
}
int rbln_memcpy_v2h(unsigned long from, unsigned long to, unsigned long size) {
    return copy(from, to, size);
}
int rbln_memcpy_v2v(unsigned long from, unsigned long to, unsigned long size) {
    return copy(from, to, size);
}
int rbln_memcpy_h2v_multi(const Copies &copies) { return copy_all(copies); }
int rbln_memcpy_v2h_multi(const Copies &copies) { return copy_all(copies); }
int rbln_memcpy_v2v_multi(const Copies &copies) { return copy_all(copies); }
int rbln_memcpy_h2v_async(unsigned long from, unsigned long to, unsigned long size,
                          unsigned long *) {
    return copy(from, to, size);
}
int rbln_memcpy_v2h_async(unsigned long from, unsigned long to, unsigned long size,
                          unsigned long *) {
    return copy(from, to, size);
}
int rbln_memcpy_v2v_async(unsigned long from, unsigned long to, unsigned long size,
                          unsigned long *) {
    return copy(from, to, size);
}

// --------------------------------------------------------------- streams, events, offloading: done

int rbln_stream_create(unsigned, unsigned long *stream) {
    *stream = 1;
    return kDone;
}
int rbln_get_current_stream(unsigned, unsigned long *stream) {
    *stream = 0;
    return kDone;
}
int rbln_set_current_stream(unsigned, unsigned long) { return kDone; }
int rbln_stream_query(unsigned long, bool *done) {
    *done = true;
    return kDone;
}
int rbln_stream_synchronize(unsigned long) { return kDone; }
int rbln_stream_wait_event(unsigned long, unsigned long) { return kDone; }
int rbln_event_create(unsigned, unsigned long *event) {
    *event = 1;
    return kDone;
}
int rbln_event_destroy(unsigned long) { return kDone; }
int rbln_event_query(unsigned long, bool *done) {
    *done = true;
    return kDone;
}
int rbln_event_record(unsigned long, unsigned long) { return kDone; }
int rbln_event_synchronize(unsigned long) { return kDone; }
int rbln_device_synchronize(unsigned) { return kDone; }
int rbln_set_file_offloading_enabled(bool) { return kDone; }
int rbln_release_offload_temp_storage(unsigned long *removed) {
    *removed = 0;
    return kDone;
}

}  // namespace rbln

// ----------------------------------------------------- collectives of the device: there to be linked

struct rccl_extra_args;
struct rccl_unique_id;

namespace rbln {
class Rccl {
public:
    enum class RcclDataType : int;
    enum class RcclReduceOp : int;
    using Buffers = std::vector<void *>;
    Rccl();
    ~Rccl();
    int Init(int, int, int, const std::vector<int> &, int);
    int InitWithUniqueId(int, int, int, const std::vector<int> &, int, const rccl_unique_id *);
    int GetUniqueIdForBroadcast(rccl_unique_id *);
    int PrepareContextAndExportMem(int);
    int CheckChunksDeviceAddrsContiguous(const Buffers &, int, RcclDataType, const char *);
    int Send(void *, int, RcclDataType, int, rccl_extra_args *);
    int Recv(void *, int, RcclDataType, int, rccl_extra_args *);
    int Broadcast(void *, void *, int, RcclDataType, int, rccl_extra_args *);
    int Scatter(const Buffers &, void *, int, RcclDataType, int, rccl_extra_args *);
    int AllGather(void *, const Buffers &, int, RcclDataType, int, rccl_extra_args *);
    int AllReduce(void *, void *, int, RcclDataType, RcclReduceOp, int, rccl_extra_args *);
    int ReduceScatter(const Buffers &, void *, int, RcclDataType, RcclReduceOp, int,
                      rccl_extra_args *);
};
Rccl::Rccl() {}
Rccl::~Rccl() {}
int Rccl::Init(int, int, int, const std::vector<int> &, int) { return kFailed; }
int Rccl::InitWithUniqueId(int, int, int, const std::vector<int> &, int, const rccl_unique_id *) {
    return kFailed;
}
int Rccl::GetUniqueIdForBroadcast(rccl_unique_id *) { return kFailed; }
int Rccl::PrepareContextAndExportMem(int) { return kFailed; }
int Rccl::CheckChunksDeviceAddrsContiguous(const Buffers &, int, RcclDataType, const char *) {
    return kFailed;
}
int Rccl::Send(void *, int, RcclDataType, int, rccl_extra_args *) { return kFailed; }
int Rccl::Recv(void *, int, RcclDataType, int, rccl_extra_args *) { return kFailed; }
int Rccl::Broadcast(void *, void *, int, RcclDataType, int, rccl_extra_args *) { return kFailed; }
int Rccl::Scatter(const Buffers &, void *, int, RcclDataType, int, rccl_extra_args *) {
    return kFailed;
}
int Rccl::AllGather(void *, const Buffers &, int, RcclDataType, int, rccl_extra_args *) { return kFailed; }
int Rccl::AllReduce(void *, void *, int, RcclDataType, RcclReduceOp, int, rccl_extra_args *) {
    return kFailed;
}
int Rccl::ReduceScatter(const Buffers &, void *, int, RcclDataType, RcclReduceOp, int,
                        rccl_extra_args *) {
    return kFailed;
}
}  // namespace rbln
