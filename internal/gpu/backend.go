package gpu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/rendezvous"
)

// Backend connects ranks that have a GPU each.
type Backend struct {
	// Notice is called with what a user should know, once each: which network interface NCCL
	// uses between machines, and that calls are given host memory, which costs two copies
	// each. Nil says nothing.
	Notice func(text string)
	// Options say how calls choose between NCCL and our kernels; nil means what
	// EURYALE_LOWLATENCY says, see [Asked].
	Options *Options

	open    func(ordinal int) (Device, error)
	driver  func() error // returns why there is none that will do
	load    func() (library, error)
	scratch int
	quick   quick
	process func() string // identifies this process

	mu      sync.Mutex
	lib     library
	devices map[int]Device
	own     Table     // what was measured as ranks connected, and could not be kept
	noticed sync.Once // that of host memory
	network sync.Once // that of the network interface
}

var _ backend.Backend = (*Backend)(nil)

// New returns the backend of ranks whose devices open opens: once each.
func New(open func(ordinal int) (Device, error)) *Backend {
	return &Backend{open: open, driver: hasDriver, load: load, scratch: scratchBytes,
		quick: quick{measureTime, mostMeasured}, process: group.Process, devices: map[int]Device{}}
}

// Open opens a GPU for [New]. It fails in programs that were built without tag gpu.
func Open(ordinal int) (Device, error) { return open(ordinal) }

// Name returns "nccl".
func (*Backend) Name() string { return "nccl" }

// Available returns nil if NCCL, the driver and a device are there.
func (b *Backend) Available() error {
	if err := b.driver(); err != nil { // NCCL may be there without
		return err
	}
	lib, err := b.library()
	if err != nil {
		return err
	}
	n, err := lib.devices()
	if err == nil && n == 0 {
		err = errors.New("no GPU: install NVIDIA's driver, and let this process use a device " +
			"(nvidia-smi, CUDA_VISIBLE_DEVICES)")
	}
	return err
}

// Describe returns NCCL's version and where it was found.
func (b *Backend) Describe() (string, error) {
	lib, err := b.library()
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("NCCL %s (%s)", versionText(lib.version()), lib.path()), nil
}

// Lacks returns what NCCL is too old for, which few jobs need: to split groups, and to encrypt what
// it sends between machines. It is empty without NCCL.
func (b *Backend) Lacks() (lacks []string) {
	lib, err := b.library()
	if err != nil {
		return nil
	}
	for _, err := range []error{lib.splits(), lib.encrypts()} {
		if err != nil {
			_, what, _ := strings.Cut(err.Error(), backend.ErrUnsupported.Error()+": ")
			lacks = append(lacks, what)
		}
	}
	return lacks
}

// Close closes the devices that the backend has opened. Communicators and
// whatever else uses them must be closed before.
func (b *Backend) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	var errs []error
	for ordinal, d := range b.devices {
		errs = append(errs, d.Close())
		delete(b.devices, ordinal)
	}
	return errors.Join(errs...)
}

// library loads NCCL once; a failure is tried again.
func (b *Backend) library() (library, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.lib != nil {
		return b.lib, nil
	}
	lib, err := b.load()
	if err != nil {
		return nil, err
	}
	b.lib = lib
	return lib, nil
}

// OpenDevice opens the device of the rank that has a number on its machine, as Connect does
// otherwise: a process may do so before it knows the other ranks.
func (b *Backend) OpenDevice(local int) error {
	lib, err := b.library()
	if err != nil {
		return err
	}
	n, err := lib.devices()
	if err == nil {
		_, err = b.device(local % max(n, 1))
	}
	return err
}

// device opens a device once.
func (b *Backend) device(ordinal int) (Device, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if d, ok := b.devices[ordinal]; ok {
		return d, nil
	}
	if err := backend.Given("gpu.New", "open", b.open); err != nil {
		return nil, err
	}
	d, err := b.open(ordinal)
	if err == nil {
		b.devices[ordinal] = d
	}
	return d, err
}

// Connect implements [backend.Backend]. The ranks of w have a device each.
func (b *Backend) Connect(ctx context.Context, w *rendezvous.World) (backend.Communicator, error) {
	ctx, cancel := context.WithTimeout(ctx, initTime(w.Timeout))
	defer cancel()
	c, err := b.connect(ctx, w, "gpu")
	if err == nil && c.unmeasured() {
		c, err = b.measured(ctx, w, c)
	}
	if err != nil {
		return nil, fmt.Errorf("rank %d of %s: backend nccl: %w", w.Rank, w.Name, err)
	}
	return c, nil
}

// initTime bounds what NCCL takes to connect, which is seconds even where all
// ranks are prompt: a short timeout for calls is none for this.
func initTime(timeout time.Duration) time.Duration { return max(timeout, time.Minute) }

// connect makes the group of all ranks. key is used once in the life of a job.
func (b *Backend) connect(ctx context.Context, w *rendezvous.World, key string) (*Communicator,
	error) {
	lib, dev, mine := b.prepare(w)
	ranks, err := group.Exchange(group.OverStore(ctx, w, key+"/rank"), nil, mine)
	if err != nil {
		return nil, err
	}
	if err := vote(ranks); err != nil {
		return nil, err
	}
	o, err := b.options()
	if err != nil { // prepare reports it, and vote then fails on every rank
		return nil, err
	}
	whole, dir := group.Whole(w), cmp.Or(env.ShmDir.Read(os.Getenv), "/dev/shm")
	board, err := group.Sharing{Gather: group.OverStore(ctx, w, key+"/board"), Rank: w.Rank,
		Dir: dir}.Board(w, whole)
	if err != nil {
		return nil, err
	}
	common := &groupState{world: w, dir: dir, timeout: w.Timeout, lib: lib, dev: dev,
		notice: b.notice, scratchLen: b.scratch, quick: b.quick,
		asked: ranks[0].Settings, limit: o.limit(w.Timeout)}
	c := newComm(common, whole, board, newChoice(decide(common.asked, ranks)))
	err = c.connect(ctx, func() (ncclComm, error) {
		return lib.join(dev, ranks[0].ID, w.Size, w.Rank)
	})
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// options are what was asked for.
func (b *Backend) options() (Options, error) {
	if b.Options != nil {
		return *b.Options, nil
	}
	return Asked("")
}

// notice passes the first text about host memory on.
func (b *Backend) notice(text string) {
	if b.Notice != nil {
		b.noticed.Do(func() { b.Notice(text) })
	}
}

// prepare does what a rank can do alone. The others learn from its rankInfo what failed.
func (b *Backend) prepare(w *rendezvous.World) (library, Device, rankInfo) {
	mine := rankInfo{Node: w.Node, Host: env.NCCLHostID.Read(os.Getenv)}
	refuse := func(err error) (library, Device, rankInfo) {
		mine.Error, mine.Unsupported = err.Error(), errors.Is(err, backend.ErrUnsupported)
		return nil, nil, mine
	}
	if err := b.Available(); err != nil {
		return refuse(err)
	}
	lib, err := b.library()
	if err != nil {
		return refuse(err)
	}
	n, err := lib.devices()
	if err != nil {
		return refuse(err)
	}
	dev, err := b.device(w.LocalRank % n)
	if err != nil {
		return refuse(err)
	}
	mine.Version = lib.version()
	mine.Bus = dev.PCIBusID()
	if w.LocalSize < w.Size {
		if err := b.chooseNetwork(lib, w); err != nil {
			return refuse(err)
		}
	}
	o, err := b.options()
	if err == nil {
		o, err = o.measured(w.Rank)
	}
	if err != nil {
		return refuse(err)
	}
	if o.measure {
		o.Table = append(o.Table, b.unkept()...)
	}
	b.shares(o, dev, &mine)
	if w.Rank == 0 {
		if mine.ID, err = lib.newID(); err != nil {
			return refuse(err)
		}
	}
	return lib, dev, mine
}

// vote returns why the ranks cannot make a group, the same on each.
func vote(ranks []rankInfo) error {
	type gpu struct {
		node      int
		host, bus string
	}
	taken := map[gpu]int{}
	for r, c := range ranks {
		if c.Unsupported {
			return fmt.Errorf("%w: rank %d cannot take part: %s", backend.ErrUnsupported, r,
				strings.TrimPrefix(c.Error, backend.ErrUnsupported.Error()+": "))
		}
		if c.Error != "" {
			return fmt.Errorf("rank %d cannot take part: %s", r, c.Error)
		}
		if c.Version != ranks[0].Version {
			return fmt.Errorf("rank 0 has NCCL %s, rank %d has %s: install the same version "+
				"on every rank, or name it in EURYALE_NCCL", versionText(ranks[0].Version), r,
				versionText(c.Version))
		}
		if ranks[0].Settings.Shared {
			continue
		}
		at := gpu{c.Node, c.Host, c.Bus}
		if other, ok := taken[at]; ok {
			return fmt.Errorf("%w: ranks %d and %d are both on the GPU at %s, but NCCL takes one "+
				"rank for each GPU: start fewer ranks, show the processes more GPUs "+
				"(CUDA_VISIBLE_DEVICES), or, to try several ranks on one, give each its own "+
				"NCCL_HOSTID", backend.ErrUnsupported, other, r, c.Bus)
		}
		taken[at] = r
	}
	return nil
}

// versionText prints NCCL's number of a version: "2.28.3" for 22803.
func versionText(v int) string {
	if v < 10000 {
		return fmt.Sprintf("%d.%d.%d", v/1000, v/100%10, v%100)
	}
	return fmt.Sprintf("%d.%d.%d", v/10000, v/100%100, v%100)
}
