// Streams of the played driver: rows of work, and places in them.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

namespace {

using Work = std::function<void()>;

struct Graph {
    std::vector<Work> work;
};

struct Stream {
    std::deque<Work> queue;
    Graph* capture = nullptr;

    void add(Work work) {
        if (capture) capture->work.push_back(std::move(work));
        else queue.push_back(std::move(work));
    }

    // No further than it must: what comes behind may itself wait for who waits here.
    template <class Done> void run_until(Done done) {
        while (!done() && !queue.empty()) {
            Work work = std::move(queue.front());
            queue.pop_front();
            work();
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
    double at = 0;
    // The how manieth record.
    size_t number = 0;
};

}  // namespace
