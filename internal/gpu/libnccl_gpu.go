//go:build gpu

package gpu

/*
#cgo LDFLAGS: -ldl
#cgo noescape euryale_nccl_run
#cgo nocallback euryale_nccl_run
#include <stdlib.h>
#include "nccl_gpu.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/cuda"
	"github.com/euryale-ml/euryale/internal/env"
)

// The oldest versions: that has what is used (ncclAvg and 16-bit brain floats), that
// splits communicators, and that encrypts, if it is built with TLS.
const (
	oldestVersion        = 21000
	oldestWithSplit      = 21800
	oldestWithEncryption = 23200
)

// dynamic is NCCL as the dynamic linker found it.
type dynamic struct {
	c      *C.struct_euryale_nccl
	number int
}

var _ library = (*dynamic)(nil)

func open(ordinal int) (Device, error) {
	d, err := cuda.Open(ordinal)
	if err != nil {
		return nil, err // and not a Device that is nil inside
	}
	return d, nil
}

func hasDriver() error { return cuda.Available() }

// load opens NCCL, at the first place where it is.
func load() (library, error) {
	c := (*C.struct_euryale_nccl)(C.calloc(1, C.sizeof_struct_euryale_nccl))
	if c == nil {
		return nil, errors.New("out of memory")
	}
	path, err := find(c)
	if err != nil {
		C.free(unsafe.Pointer(c))
		return nil, err
	}
	d := &dynamic{c: c}
	if err := d.check(path); err != nil {
		C.euryale_nccl_close(c)
		C.free(unsafe.Pointer(c))
		return nil, err
	}
	return d, nil
}

// find opens the first library that can be opened.
func find(c *C.struct_euryale_nccl) (string, error) {
	var all []error
	nccl := cuda.Library{Variable: env.NCCL, Sonames: []string{soname}, Packages: []string{"nccl"}}
	for path := range nccl.Places() {
		text := C.CString(path)
		why := C.euryale_nccl_open(c, text)
		C.free(unsafe.Pointer(text))
		if why == nil {
			return path, nil
		}
		all = append(all, errors.New(C.GoString(why)))
	}
	return "", fmt.Errorf("NCCL was not found: install it (libnccl2, or pip install "+
		"nvidia-nccl-cu13; %s or newer, %s to split groups), or name libnccl.so.2 in "+
		"EURYALE_NCCL: %w",
		versionText(oldestVersion), versionText(oldestWithSplit), errors.Join(all...))
}

const soname = "libnccl.so.2"

// check finds out whether the library is new enough.
func (d *dynamic) check(path string) error {
	if d.c.missing != nil {
		return fmt.Errorf("%s lacks %s: the oldest NCCL that works is %s", path,
			C.GoString(d.c.missing), versionText(oldestVersion))
	}
	var v C.int
	if err := d.nccl("version", C.euryale_nccl_version(d.c, &v)); err != nil {
		return err
	}
	d.number = int(v)
	if d.number < oldestVersion {
		return fmt.Errorf("%s is NCCL %s: the oldest that works is %s", path, versionText(d.number),
			versionText(oldestVersion))
	}
	return nil
}

// nccl is a result of NCCL as an error.
func (d *dynamic) nccl(what string, code C.int) error {
	if code == C.EURYALE_SUCCESS {
		return nil
	}
	text := C.GoString(C.euryale_nccl_error(d.c, code))
	if last := C.GoString(C.euryale_nccl_last_error(d.c)); last != "" {
		text += ": " + last
	}
	return fmt.Errorf("NCCL: %s: %s (NCCL_DEBUG=WARN tells more)", what, text)
}

// driver is a result of the driver as an error.
func driver(what string, code C.int) error {
	if code == C.CUDA_SUCCESS {
		return nil
	}
	var text *C.char
	if C.cuGetErrorString(C.CUresult(code), &text) != C.CUDA_SUCCESS || text == nil {
		return fmt.Errorf("CUDA: %s: error %d", what, code)
	}
	return fmt.Errorf("CUDA: %s: %s (error %d)", what, C.GoString(text), code)
}

func (d *dynamic) version() int { return d.number }

func (d *dynamic) splits() error {
	if C.euryale_nccl_splits(d.c) != 0 {
		return nil
	}
	return fmt.Errorf("%w: NCCL %s cannot split groups: the oldest that can is %s",
		backend.ErrUnsupported, versionText(d.number), versionText(oldestWithSplit))
}

func (d *dynamic) path() string { return C.GoString(C.euryale_nccl_path(d.c)) }

func (d *dynamic) devices() (int, error) {
	var n C.int
	code := C.cuInit(0)
	if code == C.CUDA_SUCCESS {
		code = C.cuDeviceGetCount(&n)
	}
	if code == C.CUDA_ERROR_NO_DEVICE {
		return 0, nil
	}
	return int(n), driver("count the devices", C.int(code))
}

func (d *dynamic) encrypts() error {
	if C.euryale_nccl_encrypts(d.c) != 0 {
		return nil
	}
	return fmt.Errorf("%w: NCCL %s cannot encrypt what it sends between machines: the oldest "+
		"that can is %s", backend.ErrUnsupported, versionText(d.number), versionText(
		oldestWithEncryption))
}

func (d *dynamic) encrypt(key string) error {
	text := C.CString(key)
	defer C.free(unsafe.Pointer(text)) // NCCL copies it
	return d.nccl("encrypt", C.euryale_nccl_encrypt(d.c, text))
}

func (d *dynamic) newID() ([]byte, error) {
	var id C.struct_euryale_id
	if err := d.nccl("unique id", C.euryale_nccl_id(d.c, &id)); err != nil {
		return nil, err
	}
	return C.GoBytes(unsafe.Pointer(&id), C.sizeof_struct_euryale_id), nil
}

func bind(dev Device, f func() error) error {
	unbind, err := dev.Bind()
	if err != nil {
		return err
	}
	defer unbind()
	return f()
}

// Stages of a pair.
const (
	joining = iota // root is being made
	forking        // fast is
	complete
)

// pair is a rank's two communicators: see the package comment.
type pair struct {
	lib    *dynamic
	dev    Device
	c      *C.struct_euryale_pair
	rank   int
	parent *pair        // whose split makes root, nil if it is joined
	stage  atomic.Int32 // abort asks for it whatever else is under way

	mu     sync.Mutex  // held while NCCL is called, but to end it
	ending atomic.Bool // nothing is called any more
}

var _ ncclComm = (*pair)(nil)

// enter keeps the pair's memory until exit.
func (p *pair) enter() error {
	p.mu.Lock()
	if p.ending.Load() {
		p.mu.Unlock()
		return fmt.Errorf("%w: NCCL's communicator", backend.ErrClosed)
	}
	return nil
}

func (p *pair) exit() { p.mu.Unlock() }

func (d *dynamic) newPair(dev Device, rank int) (*pair, error) {
	c := (*C.struct_euryale_pair)(C.calloc(1, C.sizeof_struct_euryale_pair))
	if c == nil {
		return nil, errors.New("out of memory")
	}
	return &pair{lib: d, dev: dev, c: c, rank: rank}, nil
}

func (d *dynamic) join(dev Device, id []byte, size, rank int) (ncclComm, error) {
	if len(id) != C.sizeof_struct_euryale_id {
		return nil, fmt.Errorf("the unique id has %d bytes, want %d", len(id),
			C.sizeof_struct_euryale_id)
	}
	p, err := d.newPair(dev, rank)
	if err != nil {
		return nil, err
	}
	unique := *(*C.struct_euryale_id)(unsafe.Pointer(&id[0]))
	if d.splits() != nil {
		return p.joinBlocking(size, unique), nil
	}
	code := C.euryale_nccl_join(d.c, p.c, C.int(size), &unique, C.int(rank))
	return p.begun("join", code)
}

// single is an engine of one communicator, where NCCL cannot split it: it blocks, also
// while it connects, which cannot be given up.
type single struct {
	*pair
	joined chan struct{} // closed when it has connected, or has failed to
	err    error         // why; there once joined is closed
}

func (p *pair) joinBlocking(size int, id C.struct_euryale_id) *single {
	s := &single{pair: p, joined: make(chan struct{})}
	go func() {
		defer close(s.joined)
		s.err = bind(p.dev, func() error {
			return p.lib.nccl("join", C.euryale_nccl_join_blocking(p.lib.c, p.c, C.int(size), &id,
				C.int(p.rank)))
		})
	}()
	return s
}

func (s *single) ready() (bool, error) {
	select {
	case <-s.joined:
		s.stage.Store(complete)
		return s.err == nil, s.err
	default:
		return false, nil
	}
}

func (s *single) fork(int, int) (ncclComm, error) { return nil, s.lib.splits() }

// abort of one that still connects comes once that has finished, whenever it does.
func (s *single) abort() error {
	if s.stage.Load() == complete {
		return s.pair.abort()
	}
	s.ending.Store(true)
	go func() {
		<-s.joined
		s.stage.Store(complete)
		s.pair.abort() // nobody is left to hear of an error
	}()
	return nil
}

func (p *pair) fork(color, key int) (ncclComm, error) {
	if err := p.enter(); err != nil {
		return nil, err
	}
	defer p.exit()
	part, err := p.lib.newPair(p.dev, key)
	if err != nil {
		return nil, err
	}
	part.parent = p
	code := C.euryale_nccl_fork(p.lib.c, p.c.root, C.int(color), C.int(key), &part.c.root, 0)
	return part.begun("split", code)
}

// begun returns p if it is on its way.
func (p *pair) begun(what string, code C.int) (ncclComm, error) {
	if code != C.EURYALE_SUCCESS && code != C.EURYALE_IN_PROGRESS {
		return nil, errors.Join(p.lib.nccl(what, code), p.abort())
	}
	return p, nil
}

func (p *pair) ready() (bool, error) {
	if p.stage.Load() == complete {
		return true, nil
	}
	working := p
	if p.stage.Load() == joining && p.parent != nil {
		working = p.parent
	}
	if connected, err := working.connected(); !connected || err != nil {
		return false, err
	}
	if err := p.enter(); err != nil {
		return false, err
	}
	defer p.exit()
	if p.stage.Load() == forking || p.c.root == nil { // nil: this rank takes no part
		p.stage.Store(complete)
		return true, nil
	}
	p.stage.Store(forking)
	return false, bind(p.dev, func() error {
		code := C.euryale_nccl_fork(p.lib.c, p.c.root, 0, C.int(p.rank), &p.c.fast, 1)
		if code == C.EURYALE_IN_PROGRESS {
			return nil
		}
		return p.lib.nccl("connect", code)
	})
}

// connected reports whether root is through with what it was asked for.
func (p *pair) connected() (bool, error) {
	if err := p.enter(); err != nil {
		return false, err
	}
	defer p.exit()
	switch code := C.euryale_nccl_state(p.lib.c, p.c.root); code {
	case C.EURYALE_SUCCESS:
		return true, nil
	case C.EURYALE_IN_PROGRESS:
		return false, nil
	default:
		return false, p.lib.nccl("connect", code)
	}
}

func (p *pair) run(stream uintptr, steps []ncclStep, event uintptr) error {
	if err := p.enter(); err != nil {
		return err
	}
	defer p.exit()
	r := C.euryale_nccl_run(p.lib.c, p.c.fast, (*C.struct_euryale_step)(
		unsafe.Pointer(unsafe.SliceData(steps))), C.int(len(steps)),
		C.uintptr_t(stream), C.uintptr_t(event))
	if r.cuda != C.CUDA_SUCCESS {
		return driver("start", r.cuda)
	}
	return p.lib.nccl("start", r.nccl)
}

func (p *pair) failed() error {
	if err := p.enter(); err != nil {
		return err
	}
	defer p.exit()
	code := C.euryale_nccl_state(p.lib.c, p.c.fast)
	if code == C.EURYALE_IN_PROGRESS {
		return nil
	}
	return p.lib.nccl("in the background", code)
}

func (p *pair) close() error {
	p.ending.Store(true)
	defer p.free()
	return p.both("close", func(comm C.euryale_comm) C.int {
		return C.euryale_nccl_destroy(p.lib.c, comm)
	})
}

// abort ends the collectives. What is being split off ends with its parent; until then
// NCCL may write to the pair's memory, which then stays.
func (p *pair) abort() error {
	p.ending.Store(true)
	abort := func(comm C.euryale_comm) C.int { return C.euryale_nccl_abort(p.lib.c, comm) }
	switch {
	case p.stage.Load() == complete:
		defer p.free()
		return p.both("abort", abort)
	case p.stage.Load() == joining && p.parent != nil:
		return nil
	}
	return p.endComm("abort", p.c.root, abort)
}

// free waits for a call that the end has come upon, which that ends, too.
func (p *pair) free() {
	p.mu.Lock()
	defer p.mu.Unlock()
	C.free(unsafe.Pointer(p.c))
	p.c = nil
}

// both ends the two communicators at the same time: that takes NCCL half a second for
// each, because its threads look no more often whether they should end.
func (p *pair) both(what string, f func(C.euryale_comm) C.int) error {
	fast := make(chan error, 1)
	go func() { fast <- p.endComm(what, p.c.fast, f) }()
	return errors.Join(p.endComm(what, p.c.root, f), <-fast)
}

func (p *pair) endComm(what string, comm C.euryale_comm, f func(C.euryale_comm) C.int) error {
	if comm == nil {
		return nil
	}
	return bind(p.dev, func() error { return p.gone(what, f(comm)) })
}

// gone is the end of a communicator, which may go on where it does not block.
func (p *pair) gone(what string, code C.int) error {
	if code == C.EURYALE_IN_PROGRESS {
		return nil
	}
	return p.lib.nccl(what, code)
}
