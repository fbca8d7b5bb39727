//go:build gpu

package cuda

/*
#include <cuda.h>

// In thread-local mode, what other threads do to the device meanwhile is no error.
static CUresult euryale_capture_begin(uintptr_t stream)
{
	return cuStreamBeginCapture((CUstream)stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
}

// Ends the capture and makes what can be launched of it.
static CUresult euryale_capture_end(uintptr_t stream, CUgraphExec *exec)
{
	CUgraph graph = NULL;
	CUresult code = cuStreamEndCapture((CUstream)stream, &graph);

	if (code != CUDA_SUCCESS)
		return code;
	code = cuGraphInstantiateWithFlags(exec, graph, 0);
	cuGraphDestroy(graph);
	return code;
}

static CUresult euryale_graph_launch(CUgraphExec exec, uintptr_t stream) { return cuGraphLaunch(exec, (CUstream)stream); }
*/
import "C"

import "errors"

// Graph is work of a queue that was recorded, to be started again and again: a CUDA
// graph. To start all of it takes the host about as long as one kernel.
type Graph struct {
	queue *Queue
	exec  C.CUgraphExec
}

// Capture records what f starts on the queue; nothing of it runs. f may start kernels
// whose operands are there already, and nothing else: no events, no memory, no waits, and
// no MultiTensorCopy, whose list of buffers on the device may be given back before the graph is
// launched. Nor may another goroutine take or give back memory of the device meanwhile,
// which orders all of its queues. The memory must stay as long as the graph.
func (q *Queue) Capture(f func() error) (*Graph, error) {
	g := &Graph{queue: q}
	defer q.launcher.Forget()
	err := q.device.on("capture", func() error {
		if err := result(C.euryale_capture_begin(C.uintptr_t(q.Stream()))); err != nil {
			return err
		}
		err := f()
		return errors.Join(err, result(C.euryale_capture_end(C.uintptr_t(q.Stream()), &g.exec)))
	})
	if err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

// Launch starts the work, in the order of its queue.
func (g *Graph) Launch() error {
	defer g.queue.launcher.Forget()
	return g.queue.device.on("launch a graph", func() error {
		return result(C.euryale_graph_launch(g.exec, C.uintptr_t(g.queue.Stream())))
	})
}

// Close frees the graph. What was launched goes on.
func (g *Graph) Close() error {
	if g.exec == nil {
		return nil
	}
	exec := g.exec
	g.exec = nil
	return g.queue.device.on("close a graph", func() error { return result(C.cuGraphExecDestroy(exec)) })
}

func result(code C.CUresult) error {
	if code == C.CUDA_SUCCESS {
		return nil
	}
	return failure(int(code))
}
