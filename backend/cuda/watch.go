package cuda

import (
	"slices"
	"sync"

	"github.com/euryale-ml/euryale/backend"
)

// watches are those who want to know before memory changes.
type watches struct {
	mu  sync.Mutex
	all []*watch
}

// watch is a run of memory that somebody will read later.
type watch struct {
	lo, hi   uintptr
	changing func()
}

// Watch calls changing, once, before the engine writes to the memory of b, frees
// it or recycles it: by Reset and so by the next run. stop ends that. Somebody who
// is given a value in the middle of a run can so read it later, and copies it only
// if he must.
//
// changing may start kernels on the engine's queue.
func (e *Engine) Watch(b backend.Buffer, changing func()) (stop func()) {
	w := &watch{b.Addr(), b.Addr() + uintptr(b.NBytes()), changing}
	e.watches.mu.Lock()
	defer e.watches.mu.Unlock()
	e.watches.all = append(e.watches.all, w)
	return func() { e.watches.take(func(other *watch) bool { return other == w }) }
}

// take removes and returns watches.
func (w *watches) take(which func(*watch) bool) (taken []*watch) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = slices.DeleteFunc(w.all, func(one *watch) bool {
		if !which(one) {
			return false
		}
		taken = append(taken, one)
		return true
	})
	return taken
}

// change calls those who watch any of nbytes at addr.
func (w *watches) change(addr uintptr, nbytes int) {
	for _, one := range w.take(func(one *watch) bool { return one.lo < addr+uintptr(nbytes) && addr < one.hi }) {
		one.changing()
	}
}

// changeAll calls all.
func (w *watches) changeAll() {
	for _, one := range w.take(func(*watch) bool { return true }) {
		one.changing()
	}
}
