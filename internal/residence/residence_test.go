package residence

import (
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// device is the Engine of a device.
type device struct{ tensor.StdEng }

func (device) OnDevice() {}

func TestOneElementIsOnTheHost(t *testing.T) {
	type onDevice interface{ OnDevice() }
	for _, test := range []struct {
		v    any
		want bool
	}{
		{tensor.New(tensor.FromScalar(float32(1)), tensor.WithEngine(device{})), false}, // shape ()
		{tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(1), tensor.WithEngine(device{})), false},
		{tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(1, 1), tensor.WithEngine(device{})), false},
		{tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(2), tensor.WithEngine(device{})), true},
		{tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(1, 2), tensor.WithEngine(device{})), true},
		{tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(2)), false}, // the standard Engine
		{gorgonia.NewF32(1), false},
		{nil, false},
	} {
		if e := Engine[onDevice](test.v); (e != nil) != test.want {
			t.Errorf("the engine of %#v is %v, want one: %v", test.v, e, test.want)
		}
	}
}
