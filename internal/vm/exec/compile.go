package exec

import (
	"errors"
	"fmt"
	"slices"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/vm/ir"
	"github.com/euryale-ml/euryale/internal/vm/plan"
	"github.com/euryale-ml/euryale/kernels/fuse"
)

// compile sets the function that runs a step.
func (e *Executor) compile(s *step) (err error) {
	if r, ok := e.device.(readier); ok {
		if err := r.ready(s.Op); err != nil {
			return err
		}
	}
	switch op := s.Op.(type) {
	case plan.Loop:
		s.run, err = e.loop(s, op)
	case plan.Joined:
		s.run, err = e.joined(s, op)
	case ir.Concat:
		s.run, err = e.concat(s, op)
	case ir.Unslice:
		s.run, err = e.unslice(s, op)
	case ir.MatMul:
		s.run = e.matMul(s, op)
	case ir.Gather:
		s.run = e.rows(s, rowsOf(s.Args[0].Shape, op.Axis))
	case ir.GatherGrad:
		s.run = e.rows(s, rowsOf(s.Dsts[0].Shape, op.Axis))
	case ir.Put:
		s.run = e.rows(s, rowsOf(s.Dsts[0].Shape, op.Axis))
	case plan.Send:
		s.run = func() error { return e.send(s, op) }
	case plan.Receive:
		s.run = func() error { return e.receive(op) }
	case ir.Convolution:
		s.run, err = e.convolution(s, op)
	case ir.Attention:
		s.run = e.attention(s)
	case ir.AttentionGrad:
		s.run = e.attentionGrad(s)
	case ir.LSTM:
		s.run, err = e.recurrent(s, op)
	case ir.Opaque:
		if op.Placed {
			s.run = e.startPlaced(s, e.graph.Placed(op.Index))
			break
		}
		s.waits = true
		s.run, err = e.callByDo(s, e.graph.Opaque(op.Index))
	default:
		if s.run = e.images(s); s.run == nil {
			err = fmt.Errorf("package exec does not implement %T", s.Op)
		}
	}
	return err
}

// images returns the function of an operation on images, nil if s is another one.
func (e *Executor) images(s *step) func() error {
	on, dst, x := e.device, s.Dsts[0].Shape, s.Args[0].Shape
	switch op := s.Op.(type) {
	case ir.Im2Col:
		i := imagesOf(x, dst.At(1), dst.At(2), op.Window)
		return func() error { return on.Im2Col(s.dsts[0], s.args[0], i) }
	case ir.Col2Im:
		i := imagesOf(dst, x.At(1), x.At(2), op.Window)
		return func() error { return on.Col2Im(s.dsts[0], s.args[0], i) }
	case ir.MaxPool:
		i := imagesOf(x, dst.At(2), dst.At(3), op.Window)
		i.Rectified = op.Rectified
		return func() error { return on.MaxPool(s.dsts[0], s.args[0], i) }
	case ir.MaxPoolGrad:
		dy := s.Args[1].Shape
		i := imagesOf(x, dy.At(2), dy.At(3), op.Window)
		i.Rectified = op.Rectified
		return func() error { return on.MaxPoolGrad(s.dsts[0], s.args[0], s.args[1], i) }
	}
	return nil
}

// convolution returns the function of a convolution, and notes what scratch it needs.
func (e *Executor) convolution(s *step, op ir.Convolution) (func() error, error) {
	x, _, y := op.Images(s.Args[0].Shape, s.Args[1].Shape, s.Dsts[0].Shape)
	c := kernels.Convolution{
		Images: imagesOf(x, y.At(2), y.At(3), op.Window), Filters: y.At(1), Pass: op.Pass,
		Groups: op.Groups, DType: s.Dsts[0].DType, TF32: op.TF32,
		ChannelsLast: op.ChannelsLast,
	}
	n, err := e.device.ConvolutionScratch(c)
	e.needs = max(e.needs, n)
	s.whole = true
	return func() error {
		c := c
		c.Epilogue = s.epilogue
		return e.device.Convolve(c, s.dsts[0], s.args[0], s.args[1], e.scratch)
	}, err
}

// attentionOf returns what an attention step or its gradient computes, of which y is the place of
// the result; buffers are found when it runs.
func (e *Executor) attentionOf(s *step, y plan.Ref) kernels.Attention {
	q, k, v := s.Args[0].Shape, s.Args[1].Shape, s.Args[2].Shape
	o, mask, counts := ir.Hiding(s.Op)
	a := kernels.Attention{
		Batch: q.At(0), Heads: q.At(1), Queries: q.At(2), Keys: k.At(2), Size: q.At(3),
		Group: q.At(1) / k.At(1), ValueSize: v.At(3),
		Causal: o.Causal, Appended: o.Appended, Window: o.Window, Scale: o.Scale,
		SoftCap: o.SoftCap,
		Q:       headsOf(s.Args[0]), K: headsOf(s.Args[1]), V: headsOf(s.Args[2]), Y: headsOf(y),
	}
	if mask >= 0 {
		m := s.Args[mask]
		at := func(axis int) int {
			if m.Shape.At(axis) == 1 {
				return 0
			}
			return m.Strides.At(axis)
		}
		a.Mask = kernels.Mask{Batch: at(0), Head: at(1), Row: at(2), Key: at(3)}
	}
	switch {
	case o.Lengths:
		e.check(s, s.Args[counts], k.At(2)+1, 0)
	case o.Starts:
		e.check(s, s.Args[counts], k.At(2)+1, q.At(2))
	}
	return a
}

// headsOf returns how rows of an operand [B, H, n, size] lie: layout has made sure that their
// elements are neighbours.
func headsOf(r plan.Ref) kernels.HeadRows {
	return kernels.HeadRows{Batch: r.Strides.At(0), Head: r.Strides.At(1), Row: r.Strides.At(2)}
}

// bind sets the buffers of the operands of an attention step or its gradient.
func (s *step) bind(a *kernels.Attention) {
	a.Q.Buffer, a.K.Buffer, a.V.Buffer = s.args[0], s.args[1], s.args[2]
	o, mask, counts := ir.Hiding(s.Op)
	if mask >= 0 {
		a.Mask.Buffer = s.args[mask]
	}
	switch {
	case o.Lengths:
		a.Lengths = s.args[counts]
	case o.Starts:
		a.Starts = s.args[counts]
	}
}

func (e *Executor) attention(s *step) func() error {
	a := e.attentionOf(s, s.Dsts[0])
	return func() error {
		a := a
		s.bind(&a)
		a.Y.Buffer, a.LSE = s.dsts[0], s.dsts[1]
		return e.device.Attention(a)
	}
}

func (e *Executor) attentionGrad(s *step) func() error {
	a := kernels.AttentionGrad{
		Attention: e.attentionOf(s, s.Args[3]),
		DY:        headsOf(s.Args[5]), DQ: headsOf(s.Dsts[0]), DK: headsOf(s.Dsts[1]), DV: headsOf(
			s.Dsts[2]),
	}
	return func() error {
		a := a
		s.bind(&a.Attention)
		a.Y.Buffer, a.LSE, a.DY.Buffer = s.args[3], s.args[4], s.args[5]
		a.DQ.Buffer, a.DK.Buffer, a.DV.Buffer, a.Sums = s.dsts[0], s.dsts[1], s.dsts[2], s.dsts[3]
		return e.device.AttentionGrad(a)
	}
}

// imagesOf returns the sizes of an operation on images x with a window at oh x ow places.
func imagesOf(x ir.Dims, oh, ow int, w ir.Window) kernels.Images {
	return kernels.Images{
		Batch: x.At(0), C: x.At(1), H: x.At(2), W: x.At(3), OutH: oh, OutW: ow,
		KernelH: w.H, KernelW: w.W, PadH: w.PadH, PadW: w.PadW,
		StrideH: w.StrideH, StrideW: w.StrideW, DilationH: w.DilationH, DilationW: w.DilationW,
	}
}

// fuse makes a program ready to run, and notes what scratch it needs.
func (e *Executor) fuse(p *fuse.Program) (fuse.Loop, error) {
	l, err := e.device.Fuse(p)
	if err == nil {
		e.needs = max(e.needs, l.Scratch())
	}
	return l, err
}

// loop returns the function of a fused loop.
func (e *Executor) loop(s *step, op plan.Loop) (func() error, error) {
	if s.Epilogue && e.steps[s.number-1].storedBy != nil {
		return nothing, e.storeRounded(e.steps[s.number-1], s)
	}
	l, err := e.fuse(op.Program)
	if then, ok := l.(fuse.Epilogue); ok && s.Epilogue && e.steps[s.number-1].whole {
		e.steps[s.number-1].endWith(s, then)
		return func() error { return nil }, nil
	}
	return func() error { return l.Run(s.dsts, s.args, e.scratch) }, err
}

// endWith makes a product run the loop of the step that follows it.
func (s *step) endWith(by *step, loop fuse.Epilogue) {
	product := s.run
	s.epilogue = loop
	s.run = func() error {
		if err := loop.Bind(by.dsts, by.args); err != nil {
			return err
		}
		return errors.Join(product(), loop.Unbind())
	}
}

// joined returns the function of loops that run at once, or one by one where the device cannot.
func (e *Executor) joined(s *step, op plan.Joined) (func() error, error) {
	if at, ok := e.joiner(); ok {
		l, err := at.FuseAll(op.Programs)
		if err != nil {
			return nil, err
		}
		e.needs = max(e.needs, l.Scratch())
		return func() error { return l.Run(s.dsts, s.args, e.scratch) }, nil
	}
	loops := make([]fuse.Loop, len(op.Programs))
	for i, p := range op.Programs {
		var err error
		if loops[i], err = e.fuse(p); err != nil {
			return nil, err
		}
	}
	outputs, inputs := len(op.Programs[0].Outputs), len(op.Programs[0].Inputs)
	return func() error {
		for i, l := range loops {
			if err := l.Run(s.dsts[i*outputs:(i+1)*outputs], s.args[i*inputs:(i+1)*inputs],
				e.scratch); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// copies returns the loop that copies r to elements with other strides.
func (e *Executor) copies(r plan.Ref, strides ir.Dims) (fuse.Loop, error) {
	return e.fuse(copying(r, strides))
}

// copying is the program of copies.
func copying(r plan.Ref, strides ir.Dims) *fuse.Program {
	p := &fuse.Program{Shape: r.Shape.Slice()}
	p.Store(p.Load(r.DType, r.Strides.Slice()...), r.DType, strides.Slice()...)
	return p
}

// concat copies each operand to its part of the result: at once where the device runs loops of any
// length so, or in the loop before, which computes them.
func (e *Executor) concat(s *step, op ir.Concat) (func() error, error) {
	var offsets []int
	dst, offset := s.Dsts[0], 0
	for _, a := range s.Args {
		offsets = append(offsets, offset)
		offset += a.Shape.At(op.Axis) * dst.Strides.At(op.Axis)
	}
	if s.Epilogue && !e.device.Host() {
		return nothing, e.storeConcat(e.steps[s.number-1], s, offsets)
	}
	if at, ok := e.joiner(); ok && contiguous(s, op) {
		return e.concatAtOnce(at, s, offsets)
	}
	var loops []fuse.Loop
	for _, a := range s.Args {
		l, err := e.copies(a, dst.Strides)
		if err != nil {
			return nil, err
		}
		loops = append(loops, l)
	}
	to := make([]backend.Buffer, 1)
	return func() error {
		for i, l := range loops {
			to[0] = s.dsts[0].Slice(offsets[i], s.dsts[0].Len())
			if err := l.Run(to, s.args[i:i+1], e.scratch); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// joiner returns what runs several loops at once, if the device has that.
func (e *Executor) joiner() (fuse.Joiner, bool) {
	q, ok := e.device.(*queued)
	if !ok {
		return nil, false
	}
	at, ok := q.Queue.(fuse.Joiner)
	return at, ok
}

// contiguous reports whether each operand of a concatenation is one run of elements, in memory and
// of the result.
func contiguous(s *step, op ir.Concat) bool {
	outer := 1
	for axis := range op.Axis {
		outer *= s.Dsts[0].Shape.At(axis)
	}
	return outer == 1 && s.Dsts[0].Dense() && len(s.Args) > 1 &&
		!slices.ContainsFunc(s.Args, func(r plan.Ref) bool {
			return !r.Dense() || r.Shape.Size() == 0
		})
}

// concatAtOnce copies runs of elements in one launch.
func (e *Executor) concatAtOnce(at fuse.Joiner, s *step, offsets []int) (func() error, error) {
	var all []*fuse.Program
	for _, a := range s.Args {
		p := &fuse.Program{Shape: []int{a.Shape.Size()}}
		p.Store(p.Load(a.DType, 1), a.DType, 1)
		all = append(all, p)
	}
	l, err := at.FuseAll(all)
	if err != nil {
		return nil, err
	}
	e.needs = max(e.needs, l.Scratch())
	to := make([]backend.Buffer, len(all))
	return func() error {
		for i := range to {
			to[i] = s.dsts[0].Slice(offsets[i], offsets[i]+s.args[i].Len())
		}
		return l.Run(to, s.args, e.scratch)
	}, nil
}

// alsoStored is where a loop also stores a result of its own: from an offset on in that of a step.
type alsoStored struct {
	fuse.Output
	to     *step
	offset int
}

// nothing is what a step runs whose result another one stores.
func nothing() error { return nil }

// storeConcat makes a loop store its results as parts of a concatenation, too.
func (e *Executor) storeConcat(loop, s *step, offsets []int) error {
	p := loop.Op.(plan.Loop).Program
	for i, a := range s.Args {
		out := p.Outputs[plan.PartOf(a, &loop.Step)]
		out.Strides = make([]int, len(p.Shape))
		axes, _ := plan.AxesOf(a, p.Shape)
		for j, axis := range axes {
			out.Strides[axis] = s.Dsts[0].Strides.At(j)
		}
		loop.parts = append(loop.parts, alsoStored{out, s, offsets[i]})
	}
	s.storedBy = loop
	return e.storeParts(loop)
}

// storeRounded makes the loop that stores a concatenation store it in the dtype of s, too.
func (e *Executor) storeRounded(concat, s *step) error {
	loop := concat.storedBy
	for _, p := range loop.parts {
		if p.to == concat {
			p.to, p.DType = s, s.Dsts[0].DType
			loop.parts = append(loop.parts, p)
		}
	}
	return e.storeParts(loop)
}

// storeParts makes a loop that stores its parts.
func (e *Executor) storeParts(loop *step) error {
	p := *loop.Op.(plan.Loop).Program
	p.Outputs = slices.Clone(p.Outputs)
	for _, x := range loop.parts {
		p.Outputs = append(p.Outputs, x.Output)
	}
	l, err := e.fuse(&p)
	if err != nil {
		return err
	}
	to := make([]backend.Buffer, len(p.Outputs))
	loop.run = func() error {
		n := copy(to, loop.dsts)
		for i, x := range loop.parts {
			to[n+i] = x.to.dsts[0].Slice(x.offset, x.to.dsts[0].Len())
		}
		return l.Run(to, loop.args, e.scratch)
	}
	return nil
}

// unslice copies its operand to some elements of the result, and zeroes the others.
func (e *Executor) unslice(s *step, op ir.Unslice) (func() error, error) {
	dst := s.Dsts[0]
	stride := dst.Strides.At(op.Axis)
	l, err := e.copies(s.Args[0], dst.Strides.With(op.Axis, op.Step*stride))
	if err != nil {
		return nil, err
	}
	to := make([]backend.Buffer, 1)
	return func() error {
		if err := e.device.Zero(s.dsts[0]); err != nil {
			return err
		}
		to[0] = s.dsts[0].Slice(op.Start*stride, s.dsts[0].Len())
		return l.Run(to, s.args, e.scratch)
	}, nil
}

// matrix is one operand of products: how each matrix lies, and where the batch's are.
type matrix struct {
	kernels.Matrix
	batch ir.Dims // strides of the axes before the last two
}

// matrixOf returns how a product reads op(r): layout has made sure that rows or columns are
// contiguous.
func matrixOf(r plan.Ref, transposed bool) matrix {
	n := r.Shape.Len()
	rows, columns := r.Shape.At(n-2), r.Shape.At(n-1)
	row, column := r.Strides.At(n-2), r.Strides.At(n-1)
	m := matrix{kernels.Matrix{Transposed: transposed, Pitch: max(row, columns)},
		r.Strides.Without(n - 1).Without(n - 2)}
	if byRows := (column == 1 || columns == 1) && (row >= columns || rows == 1); !byRows {
		m.Transposed, m.Pitch = !transposed, max(column, rows)
	}
	return m
}

// matMul multiplies each pair of matrices: the last axis of the batch is one call.
func (e *Executor) matMul(s *step, op ir.MatMul) func() error {
	a, b, c := matrixOf(s.Args[0], op.TransA), matrixOf(s.Args[1], op.TransB),
		matrixOf(s.Dsts[0], false)
	x, z := s.Args[0].Shape, s.Dsts[0].Shape
	n := z.Len()
	p := kernels.Product{Batch: 1, M: z.At(n - 2), N: z.At(n - 1), K: x.At(n - 1), Alpha: 1,
		TF32: op.TF32}
	if op.TransA {
		p.K = x.At(n - 2)
	}
	outer := z.Without(n - 1).Without(n - 2)
	if last := outer.Len() - 1; last >= 0 {
		p.Batch = outer.At(last)
		a.Stride, b.Stride, c.Stride = a.batch.At(last), b.batch.At(last), c.batch.At(last)
		outer = outer.With(last, 1)
	}
	s.whole = outer.Size() == 1
	return func() error {
		p := p
		p.Epilogue = s.epilogue
		for i := range outer.Size() {
			p.A, p.B, p.C = a.at(s.args[0], outer, i), b.at(s.args[1], outer, i),
				c.at(s.dsts[0], outer, i)
			if err := e.device.Multiply(p); err != nil {
				return err
			}
		}
		return nil
	}
}

// at returns entry i of a batch, in row-major order of its shape.
func (m matrix) at(b backend.Buffer, batch ir.Dims, i int) kernels.Matrix {
	at := 0
	for axis := batch.Len() - 1; axis >= 0; axis-- {
		at += i % batch.At(axis) * m.batch.At(axis)
		i /= batch.At(axis)
	}
	m.Buffer = b.Slice(at, b.Len())
	return m.Matrix
}
