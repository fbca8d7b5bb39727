package gpu

import "github.com/euryale-ml/euryale/backend"

// library is NCCL.
type library interface {
	version() int
	// splits returns nil, or why no engine can fork.
	splits() error
	// path is the file that it was loaded from.
	path() string
	// devices counts the GPUs.
	devices() (int, error)
	// encrypts returns nil, or why encrypt is not called.
	encrypts() error
	// encrypt has engines that are joined from now on encrypt what they send over sockets, by a key
	// of 32 bytes or more without zeros, the same on all ranks.
	encrypt(key string) error
	newID() ([]byte, error)
	// join begins to make one rank's engine of a group.
	join(dev Device, id []byte, size, rank int) (ncclComm, error)
}

// ncclComm is one rank's communicator of NCCL. Where nothing else is said, its
// device is bound by the caller, and one call is made at a time.
type ncclComm interface {
	// ready goes on with join or fork, and reports whether it is through. It
	// binds the device itself.
	ready() (bool, error)
	// fork begins to make the engine of a part: color -1 takes no part. The
	// engine it is called on is not used until the new one is ready.
	fork(color, key int) (ncclComm, error)
	// run starts steps on a stream, as one group if they are several, and marks
	// the stream with event if that is not 0.
	run(stream uintptr, steps []ncclStep, event uintptr) error
	// failed returns the error that NCCL has found in the background.
	failed() error
	// close frees the engine, on which nothing is under way. It waits for every
	// rank to close its own. It binds the device itself.
	close() error
	// abort ends everything under way and frees the engine, which nobody calls
	// afterwards. It may be called beside run, which then ends, too. It binds the
	// device itself.
	abort() error
}

// ncclStep is one call of NCCL, or a copy on the device. The C code reads it.
type ncclStep struct {
	what     int32
	peer     int32 // or root
	dtype    int32
	op       int32
	src, dst uintptr
	count    uint64
}

// What a step does.
const (
	stepCopy int32 = iota // count bytes
	stepSend
	stepRecv
	stepAllReduce
	stepReduceScatter
	stepAllGather
	stepBroadcast
	stepReduce
)

// NCCL's numbers.
const (
	ncclSum = iota
	ncclProd
	ncclMax
	ncclMin
	ncclAvg
)

const ncclUint8 = 1

func ncclType(d backend.DType) int32 {
	return [...]int32{backend.F16: 6, backend.BF16: 9, backend.F32: 7, backend.F64: 8,
		backend.I32: 2, backend.I64: 4, backend.U8: ncclUint8}[d]
}

func ncclOp(o backend.ReduceOp) int32 {
	return [...]int32{backend.Sum: ncclSum, backend.Avg: ncclAvg, backend.Prod: ncclProd,
		backend.Min: ncclMin, backend.Max: ncclMax}[o]
}
