//go:build gpu

package cuda

/*
#cgo noescape euryale_bind
#cgo nocallback euryale_bind
#include <cuda.h>

struct binding {
	CUresult code;
	CUcontext before;
};

static struct binding euryale_bind(CUcontext context)
{
	struct binding b;
	b.code = cuCtxGetCurrent(&b.before);
	if (b.code == CUDA_SUCCESS && b.before != context)
		b.code = cuCtxSetCurrent(context);
	return b;
}
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/gpu/driver"
	gpukernels "github.com/euryale-ml/euryale/internal/kernels/cuda"
	"github.com/euryale-ml/euryale/internal/residence"
)

// oldestCUDA is the oldest driver that the kernels are compiled for, as cuDriverGetVersion
// says it.
const oldestCUDA = 11000

// Device is one GPU, used through its primary context, which libraries such as
// NCCL use too.
//
// Its methods may be called on any goroutine. Each makes the context current on
// its thread; a caller of many can do that once, with Bind.
type Device struct {
	ordinal int
	bus     string
	model   string
	arch    int // compute capability, 90 for 9.0
	device  cu.Device
	context cu.CUContext
	kernels *gpukernels.Loaded
	memory  *cache
	staging chan *staging
	main    *Queue
	closed  atomic.Bool
	closing sync.Once
	holders atomic.Int32 // calls of Retain without Release
	returns sync.Map     // what returnTo returns, by context
	copies  residence.Copies

	mu      sync.Mutex
	queues  []*Queue              // that are open
	imports map[uintptr][]uintptr // addresses from Import, and what they were opened as
}

var (
	_ backend.Device   = (*Device)(nil)
	_ residence.Binder = (*Device)(nil)
)

func available() error {
	if err := driver.Available(); err != nil {
		return fmt.Errorf("cuda: no GPU: %w: install the NVIDIA driver for CUDA 11.0 (450.36) "+
			"or newer, and let this process use a V100 or a newer device", err)
	}
	if v := cu.Version(); v < oldestCUDA {
		return fmt.Errorf("%w: cuda: the driver is for CUDA %d.%d: install one for CUDA 11.0 "+
			"(450.36) or newer", backend.ErrUnsupported, v/1000, v%1000/10)
	}
	return nil
}

// look is Driver where there is one.
func look() (devices, version int, err error) {
	devices, err = cu.NumDevices()
	return devices, int(cu.Version()), err
}

// open is Open where there is a driver.
func open(ordinal int) (*Device, error) {
	d := &Device{ordinal: ordinal, imports: map[uintptr][]uintptr{}}
	if err := d.find(); err != nil {
		return nil, d.named("open", err)
	}
	var err error
	if d.context, err = d.device.RetainPrimaryCtx(); err != nil {
		return nil,
			d.named("open", fmt.Errorf("%w: is it used exclusively by another process "+
				"(nvidia-smi -q -d COMPUTE), or full?", err))
	}
	if err := d.prepare(); err != nil {
		return nil, errors.Join(d.named("open", err), d.Close())
	}
	return d, nil
}

// find looks the device up.
func (d *Device) find() error {
	n, err := cu.NumDevices()
	if err != nil {
		return err
	}
	if d.ordinal < 0 || d.ordinal >= n {
		return fmt.Errorf("%w: this process sees %d devices (CUDA_VISIBLE_DEVICES=%q)",
			backend.ErrArgument, n, os.Getenv("CUDA_VISIBLE_DEVICES"))
	}
	if d.device, err = cu.GetDevice(d.ordinal); err != nil {
		return err
	}
	if d.model, err = d.device.Name(); err != nil {
		return err
	}
	major, minor, err := d.device.ComputeCapability()
	if err != nil {
		return err
	}
	d.arch = 10*major + minor
	d.bus, err = busOf(d.device)
	return err
}

func busOf(d cu.Device) (string, error) {
	var text [32]C.char
	if code := C.cuDeviceGetPCIBusId(&text[0], C.int(len(text)),
		C.CUdevice(d)); code != C.CUDA_SUCCESS {
		return "", fmt.Errorf("PCI bus id: %w", failure(int(code)))
	}
	return C.GoString(&text[0]), nil
}

// prepare makes what every device has.
func (d *Device) prepare() error {
	unbind, err := d.Bind()
	if err != nil {
		return err
	}
	defer unbind()
	if d.kernels, err = gpukernels.Load(); err != nil {
		return err
	}
	if err := d.kernels.Prepare(gpukernels.QueueFamilies()...); err != nil {
		return err
	}
	d.memory = newCache(allocations{d})
	if d.staging, err = newStaging(); err != nil {
		return err
	}
	if d.main, err = d.newQueue(false); err != nil {
		return err
	}
	return d.warm()
}

// Prepare loads families of kernels, unless they are loaded. Communicators and machines do, when
// they are made. Kernels that nobody has prepared are loaded by their first launch, which must not
// be in a capture, nor while what runs on the device waits for another rank.
//
// Cost: up to seconds for a family that the driver has not compiled before.
func (d *Device) Prepare(families ...string) error {
	return d.on("load kernels", func() error { return d.kernels.Prepare(families...) })
}

// Families returns the families of kernels that are loaded, sorted.
func (d *Device) Families() []string { return d.kernels.Families() }

// warm runs what is loaded, so that the driver has put nothing off.
func (d *Device) warm() error {
	b, err := d.Alloc(512)
	if err != nil {
		return err
	}
	k := d.main.arithmetic
	host := backend.Of(make([]byte, 512))
	return errors.Join(k.Move(host, b), k.Move(b, host), k.Zero(b), k.Copy(b, b.As(backend.U8)),
		d.main.drain(), d.Free(b))
}

// Close waits for the device's queues and frees everything. Memory that was not
// freed is an error. Closing it again waits until it is closed.
func (d *Device) Close() (err error) {
	d.closing.Do(func() { err = d.close() })
	return err
}

func (d *Device) close() error {
	errs := []error{d.copies.CloseAbandoned()}
	unbind, err := d.Bind()
	if err != nil {
		return errors.Join(err, d.device.ReleasePrimaryCtx())
	}
	defer unbind()
	for _, q := range d.open() {
		errs = append(errs, q.close())
	}
	if d.staging != nil {
		errs = append(errs, freeStaging(d.staging))
	}
	if d.memory != nil {
		errs = append(errs, d.memory.close())
	}
	if d.kernels != nil {
		errs = append(errs, d.kernels.Unload())
	}
	d.closed.Store(true)
	errs = append(errs, d.device.ReleasePrimaryCtx())
	return d.named("close", errors.Join(errs...))
}

// Bind makes the device's context current on the calling goroutine's thread,
// which stays its own until unbind. Calls nest, also with those of other
// devices.
func (d *Device) Bind() (unbind func(), err error) {
	if d.closed.Load() {
		return nil, d.named("bind", backend.ErrClosed)
	}
	return d.bind()
}

// bind is Bind of a device that may be closed.
func (d *Device) bind() (unbind func(), err error) {
	runtime.LockOSThread()
	context := *(*C.CUcontext)(unsafe.Pointer(&d.context))
	b := C.euryale_bind(context)
	switch {
	case b.code != C.CUDA_SUCCESS:
		runtime.UnlockOSThread()
		return nil, d.named("make the context current", failure(int(b.code)))
	case b.before == nil || b.before == context:
		// The context stays current: nobody relies on there being none.
		return runtime.UnlockOSThread, nil
	}
	return d.returnTo(b.before), nil
}

// returnTo returns what makes another context current again: one for each, so that
// a call allocates nothing.
func (d *Device) returnTo(context C.CUcontext) func() {
	if f, ok := d.returns.Load(context); ok {
		return f.(func())
	}
	f, _ := d.returns.LoadOrStore(context, func() {
		C.cuCtxSetCurrent(context) // if it was closed since, there is nothing to return to
		runtime.UnlockOSThread()
	})
	return f.(func())
}

// on runs f with the context current, and names the device in errors.
func (d *Device) on(doing string, f func() error) error {
	unbind, err := d.Bind()
	if err != nil {
		return err
	}
	defer unbind()
	return d.named(doing, f())
}

// onRetained is on, which also works between Close and the last Release.
func (d *Device) onRetained(doing string, f func() error) error {
	if d.holders.Load() == 0 {
		return d.on(doing, f)
	}
	unbind, err := d.bind()
	if err != nil {
		return err
	}
	defer unbind()
	return d.named(doing, f())
}

// Retain keeps the device's context until Release, if need be beyond Close: Free of
// memory from Disown, FreeHost and CloseImport work until then.
func (d *Device) Retain() error {
	if d.closed.Load() {
		return d.named("retain", backend.ErrClosed)
	}
	_, err := d.device.RetainPrimaryCtx()
	if err == nil {
		d.holders.Add(1)
	}
	return d.named("retain", err)
}

// Release ends one Retain.
func (d *Device) Release() error {
	d.holders.Add(-1)
	return d.named("release", d.device.ReleasePrimaryCtx())
}

// named adds the device to an error.
func (d *Device) named(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %s: %w", d.Name(), doing, err)
}

// failure is a result of a call that cu lacks, as an error.
func failure(code int) error {
	var text *C.char
	if C.cuGetErrorString(C.CUresult(code), &text) != C.CUDA_SUCCESS || text == nil {
		return fmt.Errorf("CUDA error %d", code)
	}
	return fmt.Errorf("%s (CUDA error %d)", C.GoString(text), code)
}

// Name returns "cuda:0".
func (d *Device) Name() string { return fmt.Sprintf("cuda:%d", d.ordinal) }

// Ordinal returns the device's number among those that the process sees.
func (d *Device) Ordinal() int { return d.ordinal }

// PCIBusID returns the device's place in the machine, "0000:18:00.0", which is
// the same for all processes.
func (d *Device) PCIBusID() string { return d.bus }

// Model returns the name of the product.
func (d *Device) Model() string { return d.model }

// ComputeCapability returns the major version times ten plus the minor one: 90 for 9.0.
func (d *Device) ComputeCapability() int { return d.arch }

// Multiprocessors returns how many blocks the device runs side by side at the least, 0 if
// the driver does not say.
func (d *Device) Multiprocessors() int {
	n, err := d.device.Attribute(cu.MultiprocessorCount)
	if err != nil {
		return 0
	}
	return n
}

// Recurs reports whether the device's queues take all steps of a recurrent layer of so many samples
// and units in one kernel.
func (d *Device) Recurs(batch, size int) bool {
	return d.kernels.Recurs(batch, size, d.Multiprocessors())
}

// Default returns the queue that stands for a nil Queue, on which Alloc zeroes.
// Closing it only waits for it.
func (d *Device) Default() backend.Queue { return d.main }

// NewQueue returns a new queue, a *[Queue].
func (d *Device) NewQueue() (backend.Queue, error) { return d.queueWith(false) }

// NewUrgentQueue returns a queue of the highest priority: see [backend.UrgentQueue].
func (d *Device) NewUrgentQueue() (backend.Queue, error) { return d.queueWith(true) }

func (d *Device) queueWith(urgent bool) (backend.Queue, error) {
	q, err := d.newQueue(urgent)
	if err != nil {
		return nil, err
	}
	// Memory that was allocated before is zeroed for this queue, too.
	if err := q.follow(d.main); err != nil {
		return nil, errors.Join(err, q.Close())
	}
	return q, nil
}

// open returns the queues that are open.
func (d *Device) open() []*Queue {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.queues)
}
