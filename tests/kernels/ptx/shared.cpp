// Shared memory: who touched it since which barrier, matrices from it (9.7.15.5.15), and copies to it (9.7.9.25).
#include "vectors.h"

namespace ptx {

namespace {

// Records of the cells of an access. What lies in no variable has records that say so.
Record* records(std::vector<Record>& of, u32 address) { return of.data() + (address - SHARED_START) / 2; }

int thread_of(Record r) { return (int)((r & THREAD) >> 2); }

// Whether no barrier lies between two accesses by different threads. A warp's barriers order its own lanes.
bool race(Record a, Record b) {
    Record x = a ^ b;
    if ((x & PHASE) || !(x & THREAD)) return false;
    return (x & WARP_OF_THREAD) || !(x & WARP_PHASE);
}

[[noreturn]] void outside(Warp& w, int lane, u32 address, u32 bytes, const char* did) {
    const Launch& launch = *w.block->launch;
    const SharedVariable* nearest = nullptr;
    for (const SharedVariable& v : launch.kernel->variables) {
        if (address >= v.start && (!nearest || v.start > nearest->start)) nearest = &v;
    }
    u32 dynamic = (64u << 10) + SHARED_START;
    if (nearest && address < dynamic) {
        fault(lane, "%s %u bytes at byte %u of shared %s, outside its bounds: it has %u", did, bytes, address - nearest->start,
              nearest->name.c_str(), nearest->bytes);
    }
    fault(lane, "%s %u bytes at byte %lld of %u bytes of shared memory", did, bytes, (i64)address - dynamic, launch.shared_bytes);
}

void check_bounds(Warp& w, int lane, u32 address, u32 bytes, const char* did) {
    u32 end = SHARED_START + (u32)w.block->shared.size();
    if (address < SHARED_START || address >= end || end - address < bytes) outside(w, lane, address, bytes, did);
}

void check_write_before(Warp& w, int lane, Record r, Record now, u32 address, u32 bytes, const char* did) {
    if (r == OUTSIDE) outside(w, lane, address, bytes, did);
    if (r & UNDER_WAY) fault(lane, "%s what a copy by thread %d is on its way to", did, thread_of(r));
    if (race(r, now)) fault(lane, "%s what thread %d wrote, with no barrier between", did, thread_of(r));
}

// What a cell remembers of its readers when one more has come.
Record readers(Record r, Record now) {
    Record x = r ^ now;
    if (!r || (x & PHASE)) return now;
    if ((r & KIND) == BY_WARPS || (x & WARP_OF_THREAD)) return now | BY_WARPS;
    if (x & WARP_PHASE) return now;
    return (r & KIND) == BY_LANES || (x & THREAD) ? now | BY_LANES : now;
}

void check_reads_before(int lane, Record r, Record now) {
    Record x = r ^ now;
    if (!r || (x & PHASE)) return;
    if ((r & KIND) == BY_WARPS) fault(lane, "writes what several warps read, with no barrier between");
    if ((r & KIND) == BY_LANES && !(x & WARP_OF_THREAD) && (x & WARP_PHASE)) return;
    if ((r & KIND) == BY_LANES) fault(lane, "writes what lanes around thread %d read, with no barrier between", thread_of(r));
    if (race(r, now)) fault(lane, "writes what thread %d read, with no barrier between", thread_of(r));
}

// Of an earlier time of this block, or of this thread now.
inline bool calm(Record r, Record now) { return r == now || (!(r & KIND) && (r ^ now) >> 20); }

}  // namespace

void shared_read(Warp& w, int lane, u32 address, u32 bytes) {
    check_bounds(w, lane, address, bytes, "reads");
    Record now = w.block->stamp(w, lane);
    Record *writes = records(w.block->writes, address), *reads = records(w.block->reads, address);
    u32 cells = bytes / 2 ? bytes / 2 : 1;
    for (u32 k = 0; k < cells; k++) {
        Record r = writes[k];
        if (!r) fault(lane, "reads shared memory that nobody wrote: never, or with no barrier between");
        // Two threads may well have a byte each of one cell.
        if (!calm(r, now) && (bytes > 1 || r == OUTSIDE)) check_write_before(w, lane, r, now, address, bytes, "reads");
        reads[k] = calm(reads[k], now) ? now : readers(reads[k], now);
    }
}

void shared_write(Warp& w, int lane, u32 address, u32 bytes, Record kind) {
    check_bounds(w, lane, address, bytes, "writes");
    Record now = w.block->stamp(w, lane);
    Record *writes = records(w.block->writes, address), *reads = records(w.block->reads, address);
    u32 cells = bytes / 2 ? bytes / 2 : 1;
    for (u32 k = 0; k < cells; k++) {
        Record r = writes[k];
        bool counts = bytes > 1 || r == OUTSIDE;
        if (r && !calm(r, now) && counts) check_write_before(w, lane, r, now, address, bytes, "writes");
        if (!calm(reads[k], now) && counts) check_reads_before(lane, reads[k], now);
        writes[k] = now | kind;
    }
}

// Lanes read for each other, so what any of their warp wrote must lie behind a barrier.
void shared_read_together(Warp& w, int lane, u32 address, u32 bytes) {
    check_bounds(w, lane, address, bytes, "ldmatrix reads");
    Record now = w.block->stamp(w, lane);
    Record *writes = records(w.block->writes, address), *reads = records(w.block->reads, address);
    for (u32 k = 0; k < bytes / 2; k++) {
        Record r = writes[k];
        // Fragments may be read ahead that nobody multiplies: mma looks whether somebody wrote them.
        if (r && !((r ^ now) & (PHASE | WARP_OF_THREAD | WARP_PHASE)) && !(r & KIND)) {
            fault(lane, "ldmatrix reads what thread %d wrote, with no barrier between", thread_of(r));
        }
        if (r && !calm(r, now)) check_write_before(w, lane, r, now, address, bytes, "ldmatrix reads");
        Record mine = calm(reads[k], now) ? now : readers(reads[k], now);
        reads[k] = mine & KIND ? mine : mine | BY_LANES;
    }
}

void shared_landed(Warp& w, int lane, u32 address, u32 bytes) {
    Record* writes = records(w.block->writes, address);
    for (u32 k = 0; k < bytes / 2; k++) writes[k] = w.block->stamp(w, lane);
}

// ---- matrices ----

namespace {

// Rows of four 8x8 matrices: lanes 8m to 8m + 7 name those of matrix m.
void rows_of(Warp& w, const Instruction& i, const u8** rows) {
    u64 at[LANES];
    for (int l = 0; l < LANES; l++) {
        u64 base = i.address_bytes == 4 ? w.in<u32>(i.at[4])[l] : w.in<u64>(i.at[4])[l];
        at[l] = (u32)(base + (u64)i.number);
        if (at[l] % 16) fault(l, "ldmatrix: a row that is not aligned to 16 bytes");
        shared_read_together(w, l, (u32)at[l], 16);
        rows[l] = shared_place(w, (u32)at[l]);
    }
    if (w.block->launch->counts_memory) count_shared(w, ALL, at, 16);
}

}  // namespace

// Lane l receives of each matrix row l / 4, elements 2 (l % 4) and the next.
void load_matrices(Warp& w, const Instruction& i, u32) {
    const u8* rows[LANES];
    rows_of(w, i, rows);
    for (int m = 0; m < 4; m++) {
        u32* d = w.out<u32>(i.at[m]);
        for (int r = 0; r < 8; r++) std::memcpy(d + 4 * r, rows[8 * m + r], 16);
    }
}

// As if the matrix was stored by columns: lane l receives column l / 4, rows 2 (l % 4) and the next.
void load_matrices_transposed(Warp& w, const Instruction& i, u32) {
    const u8* rows[LANES];
    rows_of(w, i, rows);
    for (int m = 0; m < 4; m++) {
        u16 matrix[8][8];
        for (int r = 0; r < 8; r++) std::memcpy(matrix[r], rows[8 * m + r], 16);
        u32* d = w.out<u32>(i.at[m]);
        for (int l = 0; l < LANES; l++) d[l] = matrix[2 * (l % 4)][l / 4] | (u32)matrix[2 * (l % 4) + 1][l / 4] << 16;
    }
}

// ---- copies ----

namespace {

void land(Warp& w, const Copy& c, int l) {
    u8* to = shared_place(w, c.to[l]);
    if (c.given[l]) std::memcpy(to, (const void*)c.from[l], c.given[l]);
    std::memset(to + c.given[l], 0, c.bytes - c.given[l]);
}

}  // namespace

// The source is read and the target written at any time until the copy is waited for: at once, or as late as can be.
void copy_async(Warp& w, const Instruction& i, u32 lanes) {
    const u32 *to = w.in<u32>(i.at[0]), *given = w.in<u32>(i.at[2]);
    const u64* from = w.in<u64>(i.at[1]);
    Copy c;
    c.lanes = lanes, c.bytes = i.bytes;
    u64 shared[LANES];
    u32 reading = 0;
    for (int l = 0; l < LANES; l++) {
        if (!(lanes >> l & 1)) continue;
        shared[l] = c.to[l] = to[l], c.from[l] = from[l], c.given[l] = given[l], c.group[l] = w.committed[l];
        if (to[l] % c.bytes || from[l] % c.bytes) fault(l, "cp.async: an address that is not aligned to %u bytes", c.bytes);
        if (given[l] > c.bytes) fault(l, "cp.async: %u bytes of %u", given[l], c.bytes);
        if (given[l]) check_global(from[l], given[l], l, "reads"), reading |= 1u << l;
        shared_write(w, l, to[l], c.bytes, UNDER_WAY);
        if (w.block->launch->lands_early()) land(w, c, l);
    }
    if (w.block->launch->counts_memory) {
        count_shared(w, lanes, shared, c.bytes);
        if (reading) count_global(w, reading, c.from, c.bytes);
    }
    w.copies.push_back(c);
}

void copy_commit(Warp& w, const Instruction&, u32 lanes) {
    for (int l = 0; l < LANES; l++) w.committed[l] += lanes >> l & 1;
}

// Until at most `number` of a lane's newest groups are under way; below 0: until none is, committed or not.
void copy_wait(Warp& w, const Instruction& i, u32 lanes) {
    size_t kept = 0;
    for (Copy& c : w.copies) {
        for (int l = 0; l < LANES; l++) {
            if (!(c.lanes & lanes & 1u << l)) continue;
            if (i.number >= 0 && c.group[l] + (u32)i.number >= w.committed[l]) continue;
            if (!w.block->launch->lands_early()) land(w, c, l);
            shared_landed(w, l, c.to[l], c.bytes);
            c.lanes &= ~(1u << l);
        }
        if (c.lanes) w.copies[kept++] = c;
    }
    w.copies.resize(kept);
}

}  // namespace ptx
