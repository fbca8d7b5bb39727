package cuda

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// Im2Col has the meaning of [kernels.Host.Im2Col].
func (k Kernels) Im2Col(dst, src backend.Buffer, i kernels.Images) error {
	if err := check.Im2Col(dst, src, i); err != nil {
		return err
	}
	return k.images("im2col", i, dst.Len(), nil, dst, src)
}

// Col2Im has the meaning and bits of [kernels.Host.Col2Im].
func (k Kernels) Col2Im(dst, src backend.Buffer, i kernels.Images) error {
	if err := check.Col2Im(dst, src, i); err != nil {
		return err
	}
	return k.images("col2im", i, dst.Len(), nil, dst, src)
}

// MaxPool has the meaning of [kernels.Host.MaxPool].
func (k Kernels) MaxPool(dst, src backend.Buffer, i kernels.Images) error {
	if err := check.MaxPool(dst, src, i); err != nil {
		return err
	}
	return k.images("maxpool", i, dst.Len(), rectified(i), dst, src)
}

// MaxPoolGrad has the meaning and bits of [kernels.Host.MaxPoolGrad]. Where windows do not overlap,
// each image is read and written once.
func (k Kernels) MaxPoolGrad(dx, x, dy backend.Buffer, i kernels.Images) error {
	if err := check.MaxPoolGrad(dx, x, dy, i); err != nil {
		return err
	}
	n := dx.Len()
	// cells: see images.cu
	if (i.KernelH-1)*i.DilationH < i.StrideH && (i.KernelW-1)*i.DilationW < i.StrideW {
		n = i.Batch * i.C * over(i.H+i.PadH, i.StrideH) * over(i.W+i.PadW, i.StrideW)
	}
	return k.images("maxpoolgrad", i, n, rectified(i), dx, x, dy)
}

// rectified is the last parameter of pools.
func rectified(i kernels.Images) []uint64 {
	if i.Rectified {
		return []uint64{1}
	}
	return []uint64{0}
}

// images launches one of the kernels of images.cu, with a thread for each of n things.
func (k Kernels) images(verb string, i kernels.Images, n int, more []uint64,
	operands ...backend.Buffer) error {
	if operands[0].Len() == 0 {
		return nil
	}
	c := Launch{Entry: Entry{Verb: verb, Type: operands[0].DType().String()}}
	c.Grid, c.Block = Size{blocks(n, threads), 1}, Size{threads, 1}
	for _, b := range operands {
		c.pass(word(b))
	}
	for _, n := range []int{i.Batch, i.C, i.H, i.W, i.OutH, i.OutW, i.KernelH, i.KernelW, i.PadH,
		i.PadW, i.StrideH, i.StrideW, i.DilationH, i.DilationW} {
		c.pass(uint64(n))
	}
	c.pass(more...)
	return k.launcher.Launch(c)
}
