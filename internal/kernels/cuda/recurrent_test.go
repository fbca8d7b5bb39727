package cuda

import (
	"errors"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// TestRecurrentLayersHaveABlockForSixteenUnitsOfSixteenSamples also says which layers have none.
func TestRecurrentLayersHaveABlockForSixteenUnitsOfSixteenSamples(t *testing.T) {
	for _, test := range []struct {
		batch, size, blocks int
		ok                  bool
	}{{64, 512, 128, true}, {65, 512, 160, true}, {1, 16, 1, true}, {64, 528, 132, false},
		{64, 24, 8, false}, {0, 16, 0, false}, {16, 0, 0, false}} {
		if blocks, ok := Recurs(test.batch, test.size); blocks != test.blocks || ok != test.ok {
			t.Errorf("%+v: %d blocks, %v", test, blocks, ok)
		}
	}
}

// TestRecurrentLayersRefuseWhatTheyCannotCompute launches nothing.
func TestRecurrentLayersRefuseWhatTheyCannotCompute(t *testing.T) {
	k := New(newValidator(t))
	layer := func(size int) kernels.LSTM {
		f32 := func(n int) backend.Buffer { return device(backend.F32, 1<<40, n) }
		return kernels.LSTM{Steps: 2, Batch: 1, Size: size, Input: f32(8 * size), H0: f32(size),
			C0: f32(size), Weights: f32(4 * size * size), All: f32(4 * size), Kept: f32(10 * size)}
	}
	require.Report(t, k.LSTM(layer(16)))
	require.Fails(t, "24 units", k.LSTM(layer(24)), backend.ErrUnsupported)
	for name, change := range map[string]func(l *kernels.LSTM){
		"no steps":          func(l *kernels.LSTM) { l.Steps = 0 },
		"a short state":     func(l *kernels.LSTM) { l.C0 = l.C0.Slice(1, 16) },
		"kept in f64":       func(l *kernels.LSTM) { l.Kept = device(backend.F64, 1<<40, 160) },
		"all on the host":   func(l *kernels.LSTM) { l.All = backend.Of(make([]float32, 64)) },
		"rounded to halves": func(l *kernels.LSTM) { l.Rounded = device(backend.F16, 1<<40, 64) },
	} {
		l := layer(16)
		change(&l)
		require.Fails(t, name, k.LSTM(l), backend.ErrArgument)
		g := kernels.LSTMGrad{LSTM: l, DY: l.Input.Slice(0, 32), DC: l.H0,
			Gates: device(backend.F32, 1<<40, 192)}
		if err := k.LSTMGrad(g); name != "a short state" && !errors.Is(err, backend.ErrArgument) {
			t.Errorf("gradient, %s: %v", name, err)
		}
	}
}
