//go:build gpu

package cuda

/*
#cgo noescape euryale_launch
#cgo nocallback euryale_launch
#include <cuda.h>

// The oldest driver with programmatic dependent launch in graphs, too: 12.3.
#define EURYALE_PDL 12030

enum { EURYALE_PLAINLY, EURYALE_EARLY, EURYALE_TOGETHER };

// Launches early, by programmatic dependent launch (see pdl.go), or all blocks together, which in a
// capture takes the address of each parameter, one word.
static CUresult euryale_launch_as(int how, CUfunction f, unsigned int gx, unsigned int gy,
	unsigned int bx, unsigned int by, CUstream stream, uint64_t *params, size_t nbytes,
	void **extra)
{
#if CUDA_VERSION >= EURYALE_PDL
	void *words[32];
	size_t i;

	CUlaunchAttribute early = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
		.value.programmaticStreamSerializationAllowed = 1};
	CUlaunchAttribute together = {.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, .value.cooperative = 1};
	CUlaunchConfig config = {gx, gy, 1, bx, by, 1, .hStream = stream,
		.attrs = how == EURYALE_EARLY ? &early : &together, .numAttrs = 1};

	if (how == EURYALE_EARLY)
		return cuLaunchKernelEx(&config, f, NULL, extra);
	for (i = 0; i < nbytes / sizeof *params && i < sizeof words / sizeof *words; i++)
		words[i] = params + i;
	return cuLaunchKernelEx(&config, f, words, NULL);
#else
	return cuLaunchKernel(f, gx, gy, 1, bx, by, 1, 0, stream, NULL, extra);
#endif
}

// Makes the context current, and returns the one that was.
static CUresult euryale_enter(CUcontext context, CUcontext *before)
{
	CUresult code = cuCtxGetCurrent(before);
	return code == CUDA_SUCCESS ? cuCtxSetCurrent(context) : code;
}

// Makes the driver load a function now, where it may have put that off.
static CUresult euryale_load_function(CUfunction f)
{
	int registers;
	CUresult result = cuFuncGetAttribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, f);
#if CUDA_VERSION >= 12040
	// A driver that does not have this call loads functions as they are looked up.
	if (result == CUDA_SUCCESS)
		cuFuncLoad(f);
#endif
	return result;
}

// Makes the context current and launches: the caller needs no second call of C. The parameters
// are passed as bytes, so no list of pointers is needed.
static CUresult euryale_launch(CUcontext context, CUfunction f, unsigned int gx, unsigned int gy,
	unsigned int bx, unsigned int by, CUstream stream, uint64_t *params, size_t nbytes, int how,
	uintptr_t event)
{
	void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, params, CU_LAUNCH_PARAM_BUFFER_SIZE, &nbytes,
		CU_LAUNCH_PARAM_END};
	CUcontext before = NULL;
	CUresult code = cuCtxGetCurrent(&before);

	if (code == CUDA_SUCCESS && before != context)
		code = cuCtxSetCurrent(context);
	if (code == CUDA_SUCCESS && how != EURYALE_PLAINLY)
		code = euryale_launch_as(how, f, gx, gy, bx, by, stream, params, nbytes, extra);
	else if (code == CUDA_SUCCESS)
		code = cuLaunchKernel(f, gx, gy, 1, bx, by, 1, 0, stream, NULL, extra);
	if (code == CUDA_SUCCESS && event)
		code = cuEventRecord((CUevent)event, stream);
	if (before && before != context) // with none before, this one may stay
		cuCtxSetCurrent(before);
	return code;
}
*/
import "C"

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"sync"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/euryale-ml/euryale/internal/env"
)

// Loaded holds the kernels of one context.
type Loaded struct {
	context    C.CUcontext
	capability int                              // of the device
	target     int                              // for which fused kernels are written
	sources    map[string]source                // the PTX of each family
	homes      func() (map[Entry]string, error) // the family of each kernel

	loading sync.Mutex                      // held while the driver compiles
	loaded  map[string]bool                 // families
	written map[string]map[string]*function // kernels written at run time, by text and entry

	// held for a look-up alone, so that launches do not wait for the compiler
	mu        sync.RWMutex
	functions map[Entry]*function
	modules   []cu.Module
	compiled  []string // families
}

// function is a kernel of the driver.
type function struct {
	entry  Entry
	handle C.CUfunction
	traits
}

// Load finds the kernels for the device of the calling thread's context, and loads none:
// [Loaded.Prepare] does, or the first launch. EURYALE_KERNELS may name other kernels: see
// [ptxWith].
func Load() (*Loaded, error) { return load(env.Kernels.Text(os.Getenv)) }

func load(kernels string) (*Loaded, error) {
	capability, err := capability()
	if err != nil {
		return nil, err
	}
	sources, err := ptxWith(kernels, capability)
	if err != nil {
		return nil, fmt.Errorf("find the kernels: %w", err)
	}
	_, target, err := parseKernels(kernels, capability)
	if err != nil {
		return nil, err
	}
	l := &Loaded{
		capability: capability, target: target, sources: sources,
		homes:  sync.OnceValues(func() (map[Entry]string, error) { return homesIn(sources) }),
		loaded: map[string]bool{}, written: map[string]map[string]*function{},
		functions: map[Entry]*function{},
	}
	if code := C.cuCtxGetCurrent(&l.context); code != C.CUDA_SUCCESS {
		return nil, fmt.Errorf("find the kernels: %s", describe(code))
	}
	return l, nil
}

// homesIn returns the family of each kernel.
func homesIn(sources map[string]source) (map[Entry]string, error) {
	homes := map[Entry]string{}
	for family, s := range sources {
		text, err := s.text()
		if err != nil {
			return nil, err
		}
		for name := range bodies(text) {
			e, err := parseEntry(name)
			if err != nil {
				return nil, fmt.Errorf("find the kernels: family %s: %w", family, err)
			}
			homes[e] = family
		}
	}
	return homes, nil
}

// capability returns the compute capability of the current context's device.
func capability() (int, error) {
	d, err := cu.CurrentDevice()
	if err != nil {
		return 0, err
	}
	major, minor, err := d.ComputeCapability()
	return 10*major + minor, err
}

// Prepare loads families of kernels, unless they are loaded, from any thread. A launch loads its
// kernel's family as well, but later: the driver compiles PTX for up to seconds, and may first wait
// for what runs on the device, a deadlock if that waits for another rank. Nor is a capture the time
// for it.
//
// Cost: a tenth of a second where there is machine code for the device, else what the driver takes
// to compile the families, all at once, and to read them from its cache the next time.
func (l *Loaded) Prepare(families ...string) error {
	l.loading.Lock()
	defer l.loading.Unlock()
	missing := slices.DeleteFunc(slices.Compact(slices.Sorted(slices.Values(families))),
		func(family string) bool { return l.loaded[family] })
	errs := make([]error, len(missing))
	var each sync.WaitGroup
	for i, family := range missing {
		each.Go(func() { errs[i] = l.enter(func() error { return l.load(family) }) })
	}
	each.Wait()
	for i, family := range missing {
		if errs[i] != nil {
			errs[i] = fmt.Errorf("load the %s kernels: %w: they need a driver for CUDA 11 and a "+
				"device of compute capability 7.0, or newer", family, errs[i])
			continue
		}
		l.loaded[family] = true
	}
	return errors.Join(errs...)
}

// Recurs reports whether the device computes layers of so many samples and units by
// [Kernels.LSTM] on so many multiprocessors.
func (l *Loaded) Recurs(batch, size, multiprocessors int) bool {
	blocks, ok := Recurs(batch, size)
	return ok && blocks <= multiprocessors && cu.Version() >= C.EURYALE_PDL
}

// Families returns the families that are loaded, sorted.
func (l *Loaded) Families() []string {
	l.loading.Lock()
	defer l.loading.Unlock()
	return slices.Sorted(maps.Keys(l.loaded))
}

// enter runs f with the context current.
func (l *Loaded) enter(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before C.CUcontext
	if code := C.euryale_enter(l.context, &before); code != C.CUDA_SUCCESS {
		return errors.New(describe(code))
	}
	defer C.cuCtxSetCurrent(before)
	return f()
}

// load loads a family: its machine code, or where there is none that the driver takes, its text,
// which the driver compiles.
func (l *Loaded) load(family string) error {
	of, ok := l.sources[family]
	if !ok {
		return errors.New("there are none of that name")
	}
	text, err := of.text()
	if err != nil {
		return err
	}
	code, err := of.machineCode()
	if err != nil {
		return err
	}
	var functions map[string]*function
	if code != nil {
		functions, err = l.module(string(code), text)
	}
	compiled := code == nil || err != nil
	if compiled {
		functions, err = l.module(text, text)
	}
	if err != nil {
		return err
	}
	return l.add(family, compiled, functions)
}

// add makes the kernels of a family known.
func (l *Loaded) add(family string, compiled bool, functions map[string]*function) (err error) {
	for name, f := range functions {
		if f.entry, err = parseEntry(name); err != nil {
			return err
		}
		if err := f.warm(); err != nil {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range functions {
		l.functions[f.entry] = f
	}
	if compiled {
		l.compiled = append(l.compiled, family)
	}
	return nil
}

// find returns a kernel, which it loads if need be.
func (l *Loaded) find(e Entry) (*function, error) {
	if f := l.look(e); f != nil {
		return f, nil
	}
	homes, err := l.homes()
	if err != nil {
		return nil, err
	}
	family, ok := homes[e]
	if plain := e.plain(); !ok && plain != e {
		return l.find(plain)
	}
	if !ok {
		return nil, fmt.Errorf("there is no kernel %v", e)
	}
	if err := l.Prepare(family); err != nil {
		return nil, err
	}
	return l.look(e), nil
}

// look returns a kernel that is loaded, or nil.
func (l *Loaded) look(e Entry) *function {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.functions[e]
}

// module loads an image, which is a text or its machine code, and returns the kernels by name.
func (l *Loaded) module(image, text string) (map[string]*function, error) {
	m, err := cu.LoadData(image)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	l.modules = append(l.modules, m)
	l.mu.Unlock()
	functions := map[string]*function{}
	for name, body := range bodies(text) {
		f, err := m.Function(name)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		its := traitsOf(body)
		its.pdl = its.pdl && cu.Version() >= C.EURYALE_PDL
		// cu.Function is the handle and nothing else, but does not show it.
		functions[name] = &function{Entry{Verb: "fused", Type: name},
			*(*C.CUfunction)(unsafe.Pointer(&f)), its}
	}
	return functions, nil
}

// warm makes the driver load a kernel onto the device. It would do so at the first launch
// otherwise, and wait for what runs on the device.
func (f *function) warm() error {
	if code := C.euryale_load_function(f.handle); code != C.CUDA_SUCCESS {
		return fmt.Errorf("kernel %v: %s", f.entry, describe(code))
	}
	return nil
}

// Unload frees the kernels. None may run any more.
func (l *Loaded) Unload() error {
	l.loading.Lock()
	defer l.loading.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for _, m := range l.modules {
		errs = append(errs, m.Unload())
	}
	l.loaded, l.written = map[string]bool{}, nil
	l.functions, l.modules, l.compiled = nil, nil, nil
	return errors.Join(errs...)
}

// On returns the kernels on a stream.
func (l *Loaded) On(s cu.Stream) Kernels { return New(l.Launcher(s)) }

// Launcher returns the launcher of the kernels on a stream, for any thread. Use one for each
// stream: it remembers the last launch.
func (l *Loaded) Launcher(s cu.Stream) *Stream {
	return &Stream{loaded: l, handle: C.CUstream(unsafe.Pointer(s.C()))}
}

// Stream launches kernels on a stream of the driver.
type Stream struct {
	loaded *Loaded
	handle C.CUstream

	mu     sync.Mutex // held while a kernel is launched
	before succession
	recent *function // the last one; often the next, too, and found sooner than in the map
}

// Forget must be called after work of others on the stream that may release kernels before it has
// ended, such as a graph, and after launches that do not run, as in a capture.
func (s *Stream) Forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before.forgetLast()
}

// Separate makes the next launch wait for everything before it by a full dependency: in a
// capture, what a stream was ordered behind may be of another stream, or no kernel.
func (s *Stream) Separate() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before.separate = true
}

// find returns the kernel of an entry. mu is held.
func (s *Stream) find(e Entry) (*function, error) {
	if s.recent != nil && s.recent.entry == e {
		return s.recent, nil
	}
	f, err := s.loaded.find(e)
	if err == nil {
		s.recent = f
	}
	return f, err
}

// Launch implements [Launcher].
func (s *Stream) Launch(c Launch) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	f, err := s.find(c.Entry)
	if err != nil {
		return err
	}
	return s.start(f, c)
}

// start launches a kernel. mu is held.
func (s *Stream) start(f *function, c Launch) error {
	how := C.int(C.EURYALE_PLAINLY)
	if f.together {
		how = C.EURYALE_TOGETHER
	} else if s.before.overlaps(f.traits) {
		how = C.EURYALE_EARLY
	}
	params := c.Params()
	code := C.euryale_launch(s.loaded.context, f.handle, C.uint(c.Grid.X), C.uint(c.Grid.Y),
		C.uint(c.Block.X), C.uint(c.Block.Y), s.handle,
		(*C.uint64_t)(unsafe.Pointer(unsafe.SliceData(params))), C.size_t(8*len(params)), how,
		C.uintptr_t(c.Event))
	var err error
	if code != C.CUDA_SUCCESS {
		err = fmt.Errorf("launch of %v: %s", c.Entry, describe(code))
	}
	s.before.launched(f.traits, err)
	return err
}

// describe returns the driver's words for a result.
func describe(code C.CUresult) string {
	var text *C.char
	if C.cuGetErrorString(code, &text) != C.CUDA_SUCCESS || text == nil {
		return fmt.Sprintf("CUDA error %d", code)
	}
	return fmt.Sprintf("%s (CUDA error %d)", C.GoString(text), code)
}
