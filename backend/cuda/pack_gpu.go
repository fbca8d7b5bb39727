//go:build gpu

package cuda

import (
	"errors"
	"math"
	"slices"
	"sync"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
	gpukernels "github.com/euryale-ml/euryale/kernels/cuda"
)

// How many lists of buffers a queue keeps on the device, and bytes of them: two for each
// of a hundred buckets, and those of 11 GB of buffers.
const (
	mostLists     = 256
	mostListBytes = 32 << 20
)

// lists are the lists of buffers that MultiTensorCopy has copied to the device: a program packs
// and unpacks the same buffers in every step.
type lists struct {
	queue *Queue

	mu     sync.Mutex // held until what uses a list is on the queue, but not while one is made
	all    map[uint64]*list
	nbytes int
	turn   uint64
}

// list is what one call of MultiTensorCopy copies.
type list struct {
	dsts, srcs []backend.Buffer
	from, flat backend.Buffer // from the first to the last of srcs, of dsts
	table      gpukernels.Table
	onDevice   backend.Buffer
	turn       uint64 // of the last use
}

// MultiTensorCopy implements [backend.Arithmetic]: one launch, with a list of the buffers on the
// device, of 24 bytes for each piece of 8 KiB. Buffers that were copied before have theirs
// there still. Others' is copied through pinned memory: that stops the host once several
// are under way. In a graph each pair is a node. Pairs of dtypes that one kernel does not round take a launch each, and no
// list.
func (a *arithmetic) MultiTensorCopy(dsts, srcs []backend.Buffer) error {
	if a.queue.recording.Load() != nil { // a graph would need its list for as long as it is there
		if err := (kernels.Check{Device: true}).MultiTensorCopy(dsts, srcs); err != nil {
			return err
		}
		return a.copyEach(dsts, srcs)
	}
	l := &a.lists
	l.mu.Lock()
	defer l.mu.Unlock()
	key := keyOf(dsts, srcs)
	one := l.all[key]
	if one == nil || !slices.Equal(one.dsts, dsts) || !slices.Equal(one.srcs, srcs) {
		l.mu.Unlock() // that may wait for pinned memory, and Free of any memory for the lock
		var err error
		one, err = a.list(dsts, srcs)
		l.mu.Lock()
		if err != nil || one == nil {
			return err
		}
		if err := l.add(key, one); err != nil {
			return err
		}
	}
	l.turn++
	one.turn = l.turn
	return a.Pack(one.flat, one.table, one.onDevice)
}

// keyOf is a number that other buffers do not have, mostly (FNV-1a by words).
func keyOf(dsts, srcs []backend.Buffer) uint64 {
	const basis, prime = 14695981039346656037, 1099511628211
	key := uint64(basis)
	for _, buffers := range [][]backend.Buffer{dsts, srcs} {
		for _, b := range buffers {
			key = (key ^ uint64(b.Addr())) * prime
			key = (key ^ uint64(b.NBytes())) * prime
		}
	}
	return key
}

// list makes a list and copies it to the device; nil if nothing is left to copy.
func (a *arithmetic) list(dsts, srcs []backend.Buffer) (*list, error) {
	if err := (kernels.Check{Device: true}).MultiTensorCopy(dsts, srcs); err != nil {
		return nil, err
	}
	wide, half, alike := dtypesOf(dsts, srcs)
	if !alike || wide != half && !gpukernels.Rounds(wide, half) {
		return nil, a.copyEach(dsts, srcs)
	}
	flat, offsets := spanOf(dsts)
	if flat.Len() == 0 {
		return nil, nil
	}
	table, err := tableOf(wide, half, srcs, offsets)
	if err != nil {
		return nil, err
	}
	words := backend.Host(backend.I64, unsafe.Pointer(unsafe.SliceData(table.Words())), len(table.Words()))
	onDevice, err := a.queue.Alloc(words.NBytes())
	if err != nil {
		return nil, err
	}
	if err := a.Move(onDevice.As(backend.I64), words); err != nil {
		return nil, errors.Join(err, a.queue.Free(onDevice))
	}
	from, _ := spanOf(srcs)
	return &list{slices.Clone(dsts), slices.Clone(srcs), from, flat, table, onDevice, 0}, nil
}

// dtypesOf returns the dtypes of the sources and of the destinations of which all pairs
// are, but for empty ones; twice the same for any that are copied as they are.
func dtypesOf(dsts, srcs []backend.Buffer) (from, to backend.DType, alike bool) {
	first := true
	for k, dst := range dsts {
		s, d := srcs[k].DType(), dst.DType()
		switch {
		case dst.Len() == 0:
		case first:
			from, to, first = s, d, false
		case (s == d) != (from == to) || s != d && (s != from || d != to):
			return from, to, false
		}
	}
	return from, to, true
}

func tableOf(from, to backend.DType, srcs []backend.Buffer, offsets []int) (gpukernels.Table, error) {
	if from == to {
		return gpukernels.NewTable(srcs, offsets)
	}
	return gpukernels.NewRoundingTable(from, to, srcs, offsets)
}

// copyEach is MultiTensorCopy by one launch for each pair.
func (a *arithmetic) copyEach(dsts, srcs []backend.Buffer) error {
	for k, dst := range dsts {
		one := a.Cast
		if dst.DType() == srcs[k].DType() {
			one = a.Copy
		}
		if err := one(dst, srcs[k]); err != nil {
			return err
		}
	}
	return nil
}

// add keeps a list, in the place of those that were not used for longest.
func (l *lists) add(key uint64, one *list) error {
	if l.all == nil {
		l.all = map[uint64]*list{}
	}
	err := l.drop(key)
	for len(l.all) > 0 && (len(l.all) >= mostLists || l.nbytes+one.onDevice.Len() > mostListBytes) {
		err = errors.Join(err, l.drop(l.oldest()))
	}
	l.all[key] = one
	l.nbytes += one.onDevice.Len()
	return err
}

func (l *lists) oldest() (key uint64) {
	turn := uint64(math.MaxUint64)
	for k, one := range l.all {
		if one.turn < turn {
			key, turn = k, one.turn
		}
	}
	return key
}

// drop gives the memory of a list back, in the order of the queue.
func (l *lists) drop(key uint64) error {
	one := l.all[key]
	if one == nil {
		return nil
	}
	delete(l.all, key)
	l.nbytes -= one.onDevice.Len()
	return l.queue.Free(one.onDevice)
}

// forget drops the lists of memory that is being freed: those whose buffers lie around it,
// too.
func (l *lists) forget(b backend.Buffer) error {
	return l.dropAll(func(one *list) bool { return overlap(b, one.flat) || overlap(b, one.from) })
}

// close drops all.
func (l *lists) close() error { return l.dropAll(func(*list) bool { return true }) }

func (l *lists) dropAll(which func(*list) bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for key, one := range l.all {
		if which(one) {
			errs = append(errs, l.drop(key))
		}
	}
	return errors.Join(errs...)
}

func overlap(a, b backend.Buffer) bool {
	return a.Addr() < b.Addr()+uintptr(b.NBytes()) && b.Addr() < a.Addr()+uintptr(a.NBytes())
}

// spanOf returns the memory from the first to the last of the buffers, and where
// in it they begin, in bytes.
func spanOf(buffers []backend.Buffer) (flat backend.Buffer, offsets []int) {
	lo, hi := uintptr(math.MaxUint), uintptr(0)
	for _, b := range buffers {
		if b.Len() > 0 {
			lo, hi = min(lo, b.Addr()), max(hi, b.Addr()+uintptr(b.NBytes()))
		}
	}
	offsets = make([]int, len(buffers))
	if hi == 0 {
		return flat, offsets
	}
	for i, b := range buffers {
		if b.Len() > 0 {
			offsets[i] = int(b.Addr() - lo)
		}
	}
	return backend.OnDevice(backend.U8, lo, int(hi-lo)), offsets
}
