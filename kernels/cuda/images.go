package cuda

import (
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

// Im2Col is that of [kernels.Host].
func (k Kernels) Im2Col(dst, src backend.Buffer, i kernels.Images) error {
	return k.images("im2col", i, check.Im2Col(dst, src, i), dst, src)
}

// Col2Im is that of [kernels.Host], with the same bits.
func (k Kernels) Col2Im(dst, src backend.Buffer, i kernels.Images) error {
	return k.images("col2im", i, check.Col2Im(dst, src, i), dst, src)
}

// MaxPool is that of [kernels.Host].
func (k Kernels) MaxPool(dst, src backend.Buffer, i kernels.Images) error {
	return k.images("maxpool", i, check.MaxPool(dst, src, i), dst, src)
}

// MaxPoolGrad is that of [kernels.Host], with the same bits.
func (k Kernels) MaxPoolGrad(dx, x, dy backend.Buffer, i kernels.Images) error {
	return k.images("maxpoolgrad", i, check.MaxPoolGrad(dx, x, dy, i), dx, x, dy)
}

// images launches one of the kernels of images.cu, if its arguments have passed the check.
func (k Kernels) images(verb string, i kernels.Images, err error, operands ...backend.Buffer) error {
	dst := operands[0]
	if err != nil || dst.Len() == 0 {
		return err
	}
	c := Call{Entry: Entry{Verb: verb, Type: dst.DType().String()}}
	c.Grid, c.Block = Size{blocks(dst.Len(), threads), 1}, Size{threads, 1}
	for _, b := range operands {
		c.pass(word(b))
	}
	for _, n := range []int{i.Batch, i.C, i.H, i.W, i.OutH, i.OutW, i.KernelH, i.KernelW, i.PadH, i.PadW, i.StrideH, i.StrideW, i.DilationH, i.DilationW} {
		c.pass(uint64(n))
	}
	return k.launcher.Launch(c)
}
