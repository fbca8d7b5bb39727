package gpu

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/internal/testing/testranks"
)

// runAll runs each way once, to its end, and gives way i a time of i+1.
func runAll(ways []func() (backend.Work, error)) (micros []float64, err error) {
	for i, start := range ways {
		w, err := start()
		if err != nil {
			return nil, err
		}
		if err := w.Join(context.Background()); err != nil {
			return nil, err
		}
		micros = append(micros, float64(i+1))
	}
	return micros, nil
}

func TestTuneMeasuresEveryAlgorithmThatThereIsUnraced(t *testing.T) {
	const most = 16 << 20 // more than LL can send
	all := func(n int) Sample {
		return Sample{Bytes: n, NCCL: 1, LL: 2, LL128TwoShot: 3, OneShot: 4, TwoShot: 5}
	}
	chunks := func(n int) Sample { return Sample{Bytes: n, NCCL: 1, LL: 2, Push: 3} }
	for _, test := range []struct {
		kind  backend.Kind
		dtype backend.DType
		sizes []int
		want  []Sample
	}{
		{backend.AllReduce, backend.F32, []int{1, 1024, 1025, 4096, most},
			[]Sample{all(1024), all(4096), {Bytes: most, NCCL: 1,
				LL128TwoShot: 2, OneShot: 3, TwoShot: 4}}},
		{backend.AllReduce, backend.BF16, []int{1025}, []Sample{all(1024)}},
		{backend.ReduceScatter, backend.F16, []int{1024, 4096},
			[]Sample{chunks(512), chunks(2048)}},
		{backend.AllGather, backend.U8, []int{1024, most}, []Sample{chunks(512), {Bytes: most / 2,
			NCCL: 1, Push: 2}}},
		{backend.AllToAll, backend.U8, []int{1024, most}, []Sample{chunks(256), chunks(most / 4)}},
	} {
		t.Run(fmt.Sprint(test.kind, " ", test.dtype), func(t *testing.T) {
			comms := newRig(t).group(t, 2, same(options()))
			each(t, comms, func(c *Communicator) error {
				return holding(c, make([]byte, most), func(memory backend.Buffer) error {
					row := testranks.Must(c.Tune(test.kind, test.dtype, test.sizes, memory, runAll))
					if !reflect.DeepEqual(row.Samples, test.want) || row.Model != h200 ||
						row.Link != FullyConnected || row.Ranks != 2 || row.Kind != test.kind ||
						row.DType != test.dtype {
						return fmt.Errorf("%+v, want samples %+v", row, test.want)
					}
					return nil
				})
			})
		})
	}
}

func TestTuneSaysWhyItCannot(t *testing.T) {
	off := options()
	off.Off = true
	for _, test := range []struct {
		o     Options
		dtype backend.DType
		why   string
	}{{off, backend.F32, "switched off"}, {options(), backend.F64,
		"no kernels for allreduce(sum) of f64"}} {
		c := newRig(t).group(t, 2, same(test.o))[0]
		_, err := c.Tune(backend.AllReduce, test.dtype, []int{1024}, backend.Buffer{}, runAll)
		require.Fails(t, "c.Tune", err, backend.ErrUnsupported, test.why)
	}
}

func TestErrorOfARaceIsTunes(t *testing.T) {
	comms := newRig(t).group(t, 2, same(options()))
	broken := errors.New("as the test wants")
	var calls atomic.Int32
	race := func([]func() (backend.Work, error)) ([]float64, error) {
		calls.Add(1)
		return nil, broken
	}
	each(t, comms, func(c *Communicator) error {
		_, err := c.Tune(backend.AllReduce, backend.F32, []int{1024, 2048},
			backend.OnDevice(backend.U8, 1<<40, 2048), race)
		if !errors.Is(err, broken) || !strings.Contains(err.Error(), "1 KiB") {
			return fmt.Errorf("%w", err)
		}
		return nil
	})
	if calls.Load() != 2 {
		t.Errorf("%d races", calls.Load())
	}
}

func TestRowIsPrinted(t *testing.T) {
	text := rowFor(backend.F32, byOneShot).String()
	for _, part := range []string{"allreduce of f32 among 2 ranks of NVIDIA H200, " +
		"fully-connected (test)", "two-shot", "     1048576             9.00             9.00    " +
		"         9.00             1.00", "one-shot\n"} {
		require.Check(t, strings.Contains(text, part), "no %q in\n%s", part, text)
	}
}

func TestGroupThatDoesNotExistIsExplained(t *testing.T) {
	noFile(t)
	for _, test := range []struct {
		machine Survey
		o       Options
		what    backend.Collective
		bytes   int
		want    []string
	}{
		{Survey{Model: h200, Link: FullyConnected, Ranks: 4}, Options{Table: prototype()}, sum,
			2 << 20, []string{"2 MiB f32 among 4 ranks of NVIDIA H200, fully-connected: two-shot",
				"nccl 26.0 us"}},
		{Survey{Model: h200, Link: FullyConnected, Ranks: 2}, Options{Table: Table{rowFor(0,
			byOneShot)}}, sum, 1024, []string{": one-shot", "(test)"}},
		{Survey{Model: h200, Link: FullyConnected, Ranks: 2}, Options{}, sum, 1024,
			[]string{"measured (" + Shipped().find(h200s(2), backend.AllReduce,
				backend.F32).Source}},
		{Survey{Model: h200, Link: FullyConnected, Ranks: 2}, Options{Force: byLL}, sum, 1024,
			[]string{"ll, where ll is forced"}},
		{Survey{Model: h200, Link: FullyConnected, Ranks: 2}, Options{Off: true}, sum, 1024,
			[]string{": nccl: it is switched off"}},
		{Survey{Model: h200, Link: FullyConnected, Ranks: 4}, Options{},
			backend.Collective{Kind: backend.Broadcast}, 1024,
			[]string{": nccl: there are kernels for"}},
		{Survey{Model: "NVIDIA Z9", Link: PCIe, Ranks: 4}, Options{}, sum, 1024,
			[]string{"euryale bench --tune measures"}},
		{Survey{Model: h200, Link: CubeMesh, Ranks: 8}, Options{}, sum, 1024,
			[]string{": nccl\n", "euryale bench --tune measures"}},
		{Survey{Model: h200, Link: CubeMesh, Ranks: 8}, Options{Force: byMesh}, sum, 1024,
			[]string{"cube-mesh: mesh, where mesh is forced"}},
		{Survey{Model: h200, Link: CubeMesh, Ranks: 8}, Options{Force: byLL}, sum, 1024,
			[]string{"cube-mesh: mesh"}},
		{Survey{Model: h200, Link: CubeMesh, Ranks: 8}, Options{Force: byMesh},
			backend.Collective{Kind: backend.AllGather}, 1024, []string{": nccl"}},
		{Survey{Model: h200, Link: CubeMesh, Ranks: 6}, Options{}, sum, 1024,
			[]string{"has 6 ranks: a cube mesh has 8"}},
		{Survey{Model: h200, Link: FullyConnected, Ranks: 8}, Options{Force: byMesh}, sum, 1024,
			[]string{"fully-connected: nccl"}},
		{Survey{Model: h200, Link: FullyConnected, Ranks: 2, Tears: true},
			Options{Force: byLL128TwoShot}, sum, 1024, []string{"fully-connected: two-shot"}},
		{Survey{Model: h200, Link: Unknown, Ranks: 2}, Options{}, sum, 1024,
			[]string{"do not all reach"}},
		{Survey{Model: h200, Link: FullyConnected, Ranks: 9}, Options{}, sum, 1024,
			[]string{"has 9 ranks: it takes 2 to 8"}},
	} {
		text, err := test.machine.Explain(test.o, test.what, backend.F32, test.bytes)
		require.Check(t, err == nil, "%+v: %v", test.machine, err)
		for _, part := range test.want {
			require.Check(t, strings.Contains(text, part), "%+v: no %q in %q", test.machine, part,
				text)
		}
	}
	for _, wrong := range []struct {
		ranks int
		kind  backend.Kind
		dtype backend.DType
	}{{0, backend.AllReduce, backend.F32}, {2, 0, backend.F32}, {2, 200, backend.F32},
		{2, backend.AllGather, 0}, {2, backend.AllGather, 200}} {
		_, err := Survey{Model: h200, Link: FullyConnected, Ranks: wrong.ranks}.Explain(Options{},
			backend.Collective{Kind: wrong.kind}, wrong.dtype, 1)
		require.Fails(t, fmt.Sprintf("%+v", wrong), err, backend.ErrArgument)
	}
}

func TestExplainOfWhatThereIsNotSaysSo(t *testing.T) {
	comms := newRig(t).group(t, 2, same(options()))
	for _, k := range []backend.Kind{backend.AllReduce, backend.AllGather, 0, 200} {
		for _, d := range []backend.DType{0, 200} {
			if text := comms[0].Explain(backend.Collective{Kind: k}, d, 1024); !strings.Contains(
				text, ": nccl: there are kernels for") {
				t.Errorf("%v of %v: %s", k, d, text)
			}
		}
	}
}
