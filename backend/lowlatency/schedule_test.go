package lowlatency

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/kernels"
)

var update = flag.Bool("update", false, "write the golden files")

// The schedules are in testdata, to be read. Those of 2 to 8 ranks are compared.
func TestSchedulesAreThoseOnPaper(t *testing.T) {
	for _, a := range append(Algorithms()[1:], Mesh) {
		var b strings.Builder
		for W := 2; W <= 8; W++ {
			if s := schedulesOf(a, W); s != nil {
				fmt.Fprintf(&b, "%v, %d ranks\n%v\n", a, W, s)
			}
		}
		file := filepath.Join("testdata", a.String()+".txt")
		if *update {
			if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if b.String() != string(want) {
			t.Errorf("%v differs from %s (go test -update writes it)", a, file)
		}
	}
}

func schedulesOf(a Algorithm, W int) schedule {
	if a == Mesh {
		if W != cubeSize {
			return nil
		}
		return scheduleOf(a, W, Classify(dgx1()).Partners)
	}
	return scheduleOf(a, W, nil)
}

// Between two barriers nobody may read what another rank writes, and no two ranks
// may write the same.
func TestPhasesHaveNoRaces(t *testing.T) {
	for _, a := range append(Algorithms()[1:], Mesh) {
		for W := 2; W <= 8; W++ {
			for i, ph := range schedulesOf(a, W) {
				for _, s := range ph {
					for _, other := range ph {
						if s.rank != other.rank && (meet(s.to, other.from) || meet(s.to, other.to)) {
							t.Fatalf("%v, %d ranks, phase %d: %v races with %v", a, W, i+1, s, other)
						}
					}
				}
			}
		}
	}
}

func meet(a, b []cell) bool {
	return slices.ContainsFunc(a, func(c cell) bool {
		return slices.ContainsFunc(b, func(d cell) bool {
			return c.rank == d.rank && c.name == d.name && (c.segment == d.segment || c.segment == whole || d.segment == whole)
		})
	})
}

// On a cube mesh, data moves between partners only.
func TestMeshUsesLinksOnly(t *testing.T) {
	partners := Classify(dgx1()).Partners
	for _, ph := range scheduleOf(Mesh, cubeSize, partners) {
		for _, s := range ph {
			for _, c := range slices.Concat(s.from, s.to) {
				if c.rank != s.rank && !slices.Contains(partners[s.rank][:], c.rank) {
					t.Fatalf("rank %d uses %v", s.rank, c)
				}
			}
		}
	}
}

// memory is that of all ranks, by rank and name.
type memory map[string][]float32

// run carries a schedule out on operands xs, the ranks of a phase in random order,
// and returns the results. Each rank's operand starts `skew` elements into a
// buffer, another one on each rank, since alignment is nobody else's affair.
func run(random *rand.Rand, s schedule, xs [][]float32) [][]float32 {
	W, n := len(xs), len(xs[0])
	m := memory{}
	for r, x := range xs {
		skew := r % 4
		m[fmt.Sprint(r, ".x")] = append(make([]float32, skew), x...)[skew:]
	}
	for _, ph := range s {
		order := random.Perm(len(ph))
		for _, i := range order {
			m.do(ph[i], W, n)
		}
	}
	ys := make([][]float32, W)
	for r := range ys {
		ys[r] = m[fmt.Sprint(r, ".y")]
	}
	return ys
}

func (m memory) do(s step, W, n int) {
	lo, hi := bounds(s.from[0].segment, W, n)
	sum := slices.Clone(m.cells(s.from[0], n)[lo:hi])
	for _, c := range s.from[1:] {
		for i, v := range m.cells(c, n)[lo:hi] {
			sum[i] += v
		}
	}
	for _, c := range s.to {
		copy(m.cells(c, n)[lo:hi], sum)
	}
}

func (m memory) cells(c cell, n int) []float32 {
	name := fmt.Sprintf("%d.%s", c.rank, c.name)
	if m[name] == nil {
		m[name] = slices.Repeat([]float32{float32(math.NaN())}, n) // what nobody wrote
	}
	return m[name]
}

// bounds returns where a segment lies among n elements: segments are whole units of
// 16 bytes, so the last ones may be short or empty.
func bounds(segment, W, n int) (lo, hi int) {
	const unit = 4
	if segment == whole {
		return 0, n
	}
	units := (n + unit - 1) / unit
	per := (units + W - 1) / W * unit
	return min(segment*per, n), min((segment+1)*per, n)
}

// serial is the sum in rank order.
func serial(t *testing.T, xs [][]float32) []float32 {
	t.Helper()
	y := make([]float32, len(xs[0]))
	var srcs []backend.Buffer
	for _, x := range xs {
		srcs = append(srcs, backend.Of(x))
	}
	if err := (kernels.Host{}).Reduce(backend.Sum, backend.Of(y), srcs...); err != nil {
		t.Fatal(err)
	}
	return y
}

func TestSchedulesGiveTheBitsOfTheSerialSum(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for trial := range 1000 {
		W, n := 2+trial%7, 1+random.IntN(70)
		xs := make([][]float32, W)
		for r := range xs {
			for range n {
				// Exponents far apart, so that every other order has other bits.
				xs[r] = append(xs[r], float32(random.NormFloat64())*float32(math.Exp2(float64(random.IntN(20)))))
			}
		}
		want := serial(t, xs)
		for _, a := range append(Algorithms()[1:], Mesh) {
			s := schedulesOf(a, W)
			if s == nil {
				continue
			}
			for r, y := range run(random, s, xs) {
				if !slices.Equal(y, want) {
					t.Fatalf("%v, %d ranks, %d elements: rank %d has %v, want %v", a, W, n, r, y, want)
				}
			}
		}
	}
}

func TestAlgorithmNamesAreRead(t *testing.T) {
	for _, a := range append(Algorithms(), Mesh) {
		if got, err := ParseAlgorithm(a.String()); got != a || err != nil {
			t.Errorf("%v is read as %v, %v", a, got, err)
		}
	}
	for _, name := range []string{"ring", Halved.String()} {
		if _, err := ParseAlgorithm(name); err == nil {
			t.Errorf("%s can be asked for", name)
		}
	}
}
