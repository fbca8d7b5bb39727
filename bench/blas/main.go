// Command blas compares matrix multiplications of package kernels on the host with OpenBLAS's:
//
//	go run ./bench/blas [-only REGEXP] [-rounds 5] [-time 100ms] [-threads 1,2]
//
// It compiles a C program for OpenBLAS (Debian: apt-get install gcc libopenblas-dev). The two run
// each product in turns, with as many threads on the same cores, and a line is
//
//	{"op":"gemm_f32","n":1024,"threads":2,"shape":"1024x1024x1024","form":"nn",
//	 "gflops":189.1,"peer_gflops":187.2,"ratio":1.01}
//
// A product of M x K by K x N has 2 M N K operations; n is the side of a cube, or M. form says of
// each operand whether memory holds its transpose. ratio is our speed by OpenBLAS's, the median
// over the rounds. The last line is of the exponential function, and its peer is Gorgonia.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/bench"
	"github.com/euryale-ml/euryale/internal/kernels"
	"github.com/euryale-ml/euryale/internal/workers"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "blas:", err)
		os.Exit(1)
	}
}

// result is a line.
type result struct {
	Op         string  `json:"op"`
	N          int     `json:"n"`
	Threads    int     `json:"threads"`
	Shape      string  `json:"shape"`
	Form       string  `json:"form"`
	Gflops     float64 `json:"gflops"`
	PeerGflops float64 `json:"peer_gflops"`
	Ratio      float64 `json:"ratio"`
}

// product is what is measured.
type product struct {
	op      string // with its dtype
	form    string
	m, n, k int
	threads int
}

// products returns all that are measured: cubes, and a few rows by a large matrix.
func products(threads []int) []product {
	var all []product
	for _, threads := range threads {
		for _, dtype := range []string{"f32", "f64"} {
			for _, n := range []int{256, 512, 1024, 2048} {
				all = append(all, product{"gemm_" + dtype, "nn", n, n, n, threads})
			}
			for _, form := range []string{"nt", "tn"} {
				all = append(all, product{"gemm_" + dtype, form, 512, 512, 512, threads})
			}
			for _, form := range []string{"nn", "nt"} {
				for _, m := range []int{1, 4, 16, 64} {
					all = append(all, product{"skinny_" + dtype, form, m, 4096, 4096, threads})
				}
			}
		}
		all = append(all, product{"small_f32", "nt", 64, 64, 32, threads},
			product{"small_f32", "nn", 64, 32, 64, threads}, product{"small_f32", "tn", 64, 32, 64,
				threads})
		for _, n := range []int{128, 512} {
			all = append(all, product{"layer_f32", "nn", 768, n, 128, threads},
				product{"layer_f32", "nt", 768, 128, n, threads}, product{"layer_f32", "tn", n, 128,
					768, threads})
		}
	}
	return all
}

func (p product) String() string {
	return fmt.Sprintf("%s/%s/%dx%dx%d/%d", p.op, p.form, p.m, p.n, p.k, p.threads)
}

func run(ctx context.Context, out io.Writer, args []string) (err error) {
	flags := flag.NewFlagSet("blas", flag.ContinueOnError)
	only := flags.String("only", "", "measure products whose name matches, as in "+
		"gemm_f32/nn/256x256x256/2")
	rounds := flags.Int("rounds", 5, "how often each program runs a product")
	budget := flags.Duration("time", 100*time.Millisecond,
		"how long the calls of a round should take")
	list := flags.String("threads", "1,2", "numbers of threads")
	if err := flags.Parse(args); err != nil {
		return err
	}
	pattern, err := regexp.Compile(*only)
	if err != nil {
		return err
	}
	threads, err := numbers(*list)
	if err != nil {
		return err
	}
	peer, err := buildOpenBLAS(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, peer.Close()) }()
	for _, p := range products(threads) {
		if !pattern.MatchString(p.String()) {
			continue
		}
		line, err := p.compare(ctx, peer, *rounds, *budget)
		if err != nil {
			return err
		}
		if err := json.NewEncoder(out).Encode(line); err != nil {
			return err
		}
	}
	if !pattern.MatchString(expName) {
		return nil
	}
	line, err := compareExp(*rounds, *budget)
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(line)
}

// numbers reads a list of positive numbers.
func numbers(list string) ([]int, error) {
	var all []int
	for text := range strings.SplitSeq(list, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("threads are numbers such as 1,2: %q is none", text)
		}
		all = append(all, n)
	}
	return all, nil
}

// compare measures a product in turns. Go has as many threads as OpenBLAS.
func (p product) compare(ctx context.Context, peer *openBLAS, rounds int,
	budget time.Duration) (result, error) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(p.threads))
	host := kernels.Host{Workers: workers.New(p.threads)}
	defer host.Workers.Close()
	_, dtype, _ := strings.Cut(p.op, "_")
	operands := p.operands(dtype)
	pairs, err := bench.Turns(rounds, func(program int) (map[int]float64, error) {
		var micros float64
		var err error
		if program == 0 {
			micros, err = peer.Gemm(ctx, p.threads, dtype, p.form, p.m, p.n, p.k, budget)
		} else {
			micros, err = median(budget, func() error { return host.Multiply(operands) })
		}
		return map[int]float64{p.m: micros}, err
	})
	if err != nil {
		return result{}, fmt.Errorf("%v: %w", p, err)
	}
	flops := 2 * float64(p.m) * float64(p.n) * float64(p.k) / 1e3 // by microseconds: 1e9 a second
	pair := pairs[0]
	return result{
		Op: p.op, N: p.m, Threads: p.threads, Shape: fmt.Sprintf("%dx%dx%d", p.m, p.n, p.k),
		Form:   p.form,
		Gflops: rounded(flops / pair.Micros[1]), PeerGflops: rounded(flops / pair.Micros[0]),
		Ratio: rounded(1 / pair.Ratio),
	}, nil
}

func rounded(x float64) float64 { return float64(int(x*1000+0.5)) / 1000 }

// operands returns the product of small integers.
func (p product) operands(dtype string) kernels.Product {
	matrix := func(rows, columns int, transposed bool) kernels.Matrix {
		if transposed {
			rows, columns = columns, rows
		}
		numbers := make([]float64, rows*columns)
		for i := range numbers {
			numbers[i] = float64(i*7%11 - 5)
		}
		b := backend.Of(numbers)
		if dtype == "f32" {
			narrow := make([]float32, len(numbers))
			for i, x := range numbers {
				narrow[i] = float32(x)
			}
			b = backend.Of(narrow)
		}
		return kernels.Matrix{Buffer: b, Pitch: columns, Transposed: transposed}
	}
	return kernels.Product{
		M: p.m, N: p.n, K: p.k, Alpha: 1,
		A: matrix(p.m, p.k, p.form[0] == 't'), B: matrix(p.k, p.n, p.form[1] == 't'), C: matrix(
			p.m, p.n, false),
	}
}

// median returns the microseconds of a call: two come before those that are timed for about so
// long, and at least three.
func median(budget time.Duration, call func() error) (float64, error) {
	var micros []float64
	var begin time.Time
	for i := -2; i < 3 || time.Since(begin) < budget; i++ {
		before := time.Now()
		if i == 0 {
			begin = before
		}
		if err := call(); err != nil {
			return 0, err
		}
		if i >= 0 {
			micros = append(micros, float64(time.Since(before).Nanoseconds())/1e3)
		}
	}
	slices.Sort(micros)
	return micros[len(micros)/2], nil
}
