//go:build gpu

package cuda

import (
	"fmt"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// Fuse makes a program ready to run on the stream, from any thread. Its kernel is compiled now,
// once for each program and context. Operands that are not aligned to [fuse.Alignment] take another
// kernel, which the first Run with such operands compiles: that must not be while the stream is
// captured. A Loop is used by one goroutine at a time.
func (s *Stream) Fuse(p *fuse.Program) (fuse.Loop, error) { return s.FuseAll([]*fuse.Program{p}) }

// FuseAll is Fuse of several programs at once: see [fuse.Joiner].
func (s *Stream) FuseAll(all []*fuse.Program) (fuse.Loop, error) {
	f := &fused{stream: s, programs: all}
	for v := range f.variants {
		var err error
		if f.variants[v].kernel, err = fuse.PTXAll(all, v == aligned, s.loaded.target); err != nil {
			return nil, err
		}
	}
	return f, f.variants[aligned].compile(s.loaded)
}

// fused is a program on a stream, or several at once.
type fused struct {
	stream   *Stream
	programs []*fuse.Program
	variants [2]variantOf
	params   []uint64
}

// The variants: without vectors, and with.
const (
	unaligned = iota
	aligned
)

// variantOf is a kernel of a program, with a function for each launch; nil before it is compiled.
type variantOf struct {
	kernel    fuse.Kernel
	functions []*function
	chosen    []uint64 // parameters of the last launch
}

// smallGrid is how many blocks of a fused kernel leave room for the next one: half of an H200.
const smallGrid = 66

// compile loads the kernel, unless it is loaded.
func (v *variantOf) compile(l *Loaded) error {
	if v.functions != nil {
		return nil
	}
	var small []string
	for _, launch := range v.kernel.Launches {
		if launch.Blocks <= smallGrid {
			small = append(small, launch.Entry)
		}
	}
	all, err := l.loadText(v.kernel.Text, small)
	if err != nil {
		return err
	}
	for _, launch := range v.kernel.Launches {
		v.functions = append(v.functions, all[launch.Entry])
	}
	return nil
}

// loadText loads a text that was written at run time, or returns what was loaded of the same text,
// in which the same kernels are small.
func (l *Loaded) loadText(text string, small []string) (functions map[string]*function, err error) {
	l.loading.Lock()
	defer l.loading.Unlock()
	if functions, ok := l.written[text]; ok {
		return functions, nil
	}
	loaded := text
	if l.capability >= hopper {
		loaded = withPDL(text, small...)
	}
	err = l.enter(func() error {
		functions, err = l.module(loaded, loaded)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("compile a fused kernel: %w, of\n%s", err, loaded)
	}
	l.written[text] = functions
	return functions, nil
}

// Scratch implements [fuse.Loop].
func (f *fused) Scratch() int {
	return max(f.variants[unaligned].kernel.Scratch, f.variants[aligned].kernel.Scratch)
}

// Run implements [fuse.Loop].
func (f *fused) Run(dst, src []backend.Buffer, scratch backend.Buffer) error {
	if err := f.check(dst, src); err != nil {
		return err
	}
	if need := f.Scratch(); need > 0 && (!scratch.Device() || scratch.NBytes() < need ||
		scratch.Addr()%fuse.Alignment != 0) {
		return fmt.Errorf("%w: scratch of %d bytes at %#x, want %d bytes of device memory at a "+
			"multiple of %d",
			backend.ErrArgument, scratch.NBytes(), scratch.Addr(), need, fuse.Alignment)
	}
	f.params = f.params[:0]
	addresses := uint64(0)
	for _, operands := range [...][]backend.Buffer{dst, src} {
		for _, b := range operands {
			f.params = append(f.params, word(b))
			addresses |= word(b)
		}
	}
	f.params = append(f.params, word(scratch))
	v := &f.variants[unaligned]
	if addresses%fuse.Alignment == 0 {
		v = &f.variants[aligned]
	}
	if err := v.compile(f.stream.loaded); err != nil {
		return err
	}
	return f.stream.launchAll(v, f.params)
}

// check says which buffer of a run does not fit.
func (f *fused) check(dst, src []backend.Buffer) error {
	outputs, inputs := len(f.programs[0].Outputs), len(f.programs[0].Inputs)
	if n := len(f.programs); len(dst) != n*outputs || len(src) != n*inputs {
		return fmt.Errorf("%w: %d programs of %d outputs and %d inputs run with %d and %d",
			backend.ErrArgument, n, outputs, inputs, len(dst), len(src))
	}
	for i, p := range f.programs {
		if err := p.CheckBuffers(dst[i*outputs:(i+1)*outputs], src[i*inputs:(i+1)*inputs],
			true); err != nil {
			return err
		}
	}
	return nil
}

// launchAll launches the kernels of a variant.
func (s *Stream) launchAll(v *variantOf, params []uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, l := range v.kernel.Launches {
		f := v.functions[i]
		c := Launch{Entry: f.entry, Grid: Size{uint32(l.Blocks), 1}, Block: Size{uint32(l.Threads),
			1}, many: params}
		if l.Params != nil {
			v.chosen = v.chosen[:0]
			for _, number := range l.Params {
				v.chosen = append(v.chosen, params[number])
			}
			c.many = v.chosen
		}
		if err := s.start(f, c); err != nil {
			return err
		}
	}
	return nil
}
