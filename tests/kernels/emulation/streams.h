// Streams of the emulated driver: queues of work, events, and graphs that are captured from them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <vector>

namespace {

using Work = std::function<void()>;
// CUDA_LAUNCH_BLOCKING: work in a stream runs at once.
bool blocking = false;
// A thread that waits for one stream never blocks in a collective: work that must wait for another rank sets
// `unfinished` while its thread is `trying`, and is continued later.
thread_local bool trying = false, unfinished = false;
// Numbers of nodes.
using Nodes = std::vector<size_t>;

// Memory of a node's arguments: the address, and the serial number of its allocation.
struct Use {
    uint64_t address, serial;
};

struct Node {
    Work work;
    Nodes after;
    std::vector<Use> uses;
};

struct Stream;

struct Graph {
    std::vector<Node> nodes;
    // After instantiation: the launch order of the nodes.
    Nodes order;
    uint64_t id = 0;
    // During the capture: its first stream, and the streams that joined it.
    Stream* origin = nullptr;
    std::vector<Stream*> streams;
    // The first status that ended the capture.
    int broken = 0;

    std::vector<bool> reached(const Nodes& from) const {
        std::vector<bool> seen(nodes.size());
        for (Nodes open = from; !open.empty();) {
            size_t at = open.back();
            open.pop_back();
            if (seen[at]) continue;
            seen[at] = true;
            open.insert(open.end(), nodes[at].after.begin(), nodes[at].after.end());
        }
        return seen;
    }

    // Always the last node that may be next, so unordered nodes run in another order than they were captured in.
    void sort() {
        Nodes sorted, waits(nodes.size());
        for (const Node& node : nodes) waits[&node - nodes.data()] = node.after.size();
        std::vector<bool> done(nodes.size());
        while (sorted.size() < nodes.size()) {
            size_t next = nodes.size();
            while (done[next - 1] || waits[next - 1] > 0) next--;
            done[--next] = true;
            sorted.push_back(next);
            for (const Node& node : nodes) {
                waits[&node - nodes.data()] -= std::count(node.after.begin(), node.after.end(), next);
            }
        }
        order = sorted;
    }
};

struct Stream {
    int priority = 0;
    std::deque<Work> queue;
    Graph* capture = nullptr;
    // In a capture: the nodes that the next node follows.
    Nodes tips;

    void add(Work work, std::vector<Use> uses = {}) {
        if (!capture) {
            queue.push_back(std::move(work));
            if (blocking) run();
            return;
        }
        capture->nodes.push_back({std::move(work), tips, std::move(uses)});
        tips = {capture->nodes.size() - 1};
    }

    void behind(const Nodes& more) {
        for (size_t node : more) {
            if (std::find(tips.begin(), tips.end(), node) == tips.end()) tips.push_back(node);
        }
    }

    // No further than necessary: later work may itself wait for the waiter.
    template <class Done> void run_until(Done done) {
        while (!done() && !queue.empty()) {
            Work work = std::move(queue.front());
            queue.pop_front();
            work();
            if (unfinished) return queue.push_front(std::move(work));
        }
    }

    void run() {
        run_until([] { return false; });
    }
};

// An event. It may be recorded again before the stream reaches it: waiters wait for the earlier record.
struct Event {
    Stream* stream = nullptr;
    // The number of records, and the last one that its stream has reached.
    std::atomic<uint64_t> recorded{0}, passed{0};
    bool is_timed = true;
    double at = 0;
    // The capture of its last record, and the nodes before it.
    std::atomic<uint64_t> capture{0};
    Nodes tips;
};

}  // namespace
