// Captures and graphs of the emulated driver; a part of driver.cpp.
#pragma once

API cuStreamBeginCapture_v2(Stream* stream, int) {
    READY;
    static uint64_t begun = 0;
    if (stream->capture) return CaptureUnsupported;
    Graph* graph = new Graph;
    graph->id = ++begun;
    graph->origin = stream;
    graph->streams = {stream};
    capturing[graph->id] = stream->capture = graph;
    stream->tips.clear();
    return Success;
}

API cuStreamEndCapture(Stream* stream, Graph** graph) {
    LOCK;
    if (int status = ready()) return status;
    Graph* captured = stream->capture;
    *graph = nullptr;
    if (!captured) return CaptureUnsupported;
    if (captured->origin != stream) return ends_capture(stream, CaptureUnmatched);
    // The capture also ends if this fails.
    int status = captured->broken ? captured->broken : told(__func__);
    std::vector<bool> joined = captured->reached(stream->tips);
    for (Stream* other : captured->streams) {
        for (size_t tip : other->tips) {
            if (!joined[tip] && !status) status = CaptureUnjoined;
        }
        other->capture = nullptr;
        other->tips.clear();
    }
    capturing.erase(captured->id);
    if (status) delete captured;
    else *graph = captured;
    return status;
}

API cuGraphInstantiateWithFlags(Graph** exec, Graph* graph, unsigned long long) {
    READY;
    *exec = new Graph(*graph);
    (*exec)->sort();
    return Success;
}

API cuGraphDestroy(Graph* graph) {
    READY;
    delete graph;
    return Success;
}

API cuGraphUpload(Graph*, Stream*) {
    READY;
    return Success;
}

API cuGraphLaunch(Graph* graph, Stream* stream) {
    READY;
    for (size_t node : graph->order) stream->add(guarded(graph->nodes[node]));
    return Success;
}

API cuGraphExecDestroy(Graph* graph) {
    FREES;
    delete graph;
    return fault;
}

// The same within a capture: `work` runs at each launch of the graph, and `drop` when the graph is destroyed. `uses`
// are the addresses in its arguments.
API emulated_capture_work(Stream* stream, int (*work)(void*), void* data, void (*drop)(void*), const uint64_t* uses, size_t count) {
    LOCK;
    if (int status = ready()) return status;
    std::vector<Use> known;
    for (size_t i = 0; i < count; i++) known.push_back(use_of(uses[i]));
    std::shared_ptr<void> held(data, drop);
    stream->add([=] { answered(work(held.get())); }, known);
    return Success;
}

// The number of the capture that a stream belongs to; 0: none.
extern "C" uint64_t emulated_capture(Stream* stream) {
    LOCK;
    return stream->capture ? stream->capture->id : 0;
}
