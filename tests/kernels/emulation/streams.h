// Streams of the emulated driver: rows of work, places in them, and graphs that are captured from them.
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
// CUDA_LAUNCH_BLOCKING: what is put into a stream is done at once.
bool blocking = false;
// A thread that waits for one stream never blocks in a collective: work that must wait for another rank sets
// `unfinished` while its thread is `trying`, and is continued later.
thread_local bool trying = false, unfinished = false;
// Numbers of nodes.
using Nodes = std::vector<size_t>;

// Memory that a node was given: where, and which of the runs that were ever allocated there.
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
    // Once it is made: the order in which nodes are launched.
    Nodes order;
    uint64_t id = 0;
    // While it is captured: the stream that it began with, and the streams that joined it.
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

    // As late a node as may be next, always: what nothing orders comes in another order than it was captured in.
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

    // No further than it must: later work may itself wait for the waiter.
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

// A place in a stream. It may be moved on before the stream has come there: who waits, waits for the place that it had.
struct Event {
    Stream* stream = nullptr;
    // How often it was put somewhere, and by which of these the stream has come.
    std::atomic<uint64_t> recorded{0}, passed{0};
    bool is_timed = true;
    double at = 0;
    // The capture in which it was recorded last, and the nodes before it.
    std::atomic<uint64_t> capture{0};
    Nodes tips;
};

}  // namespace
