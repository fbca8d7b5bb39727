package bucket_test

import (
	"bytes"
	"errors"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/autograd/solver"
	"github.com/euryale-ml/euryale/bucket"
	"github.com/euryale-ml/euryale/fit"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/testing/objectstore"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/models"
	"github.com/euryale-ml/euryale/models/tokenizer"
	"github.com/euryale-ml/euryale/vm"
)

// upload copies a folder to the bucket.
func upload(t *testing.T, dir, url string) {
	t.Helper()
	to := open(t, url)
	one := func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		return to.Create(name, files.Text(text))
	}
	require.NoError(t, fs.WalkDir(os.DirFS(dir), ".", one))
}

// learned returns the learnables of a model.
func learned(t *testing.T, m *models.Model) map[string]*tensor.Dense {
	t.Helper()
	l := require.Value(layers.NewLayout(autograd.Solo(), 0, 1, 1))(t)
	defer l.Close()
	b := layers.NewBuilder(gorgonia.NewGraph(), l, tensor.Float32, 1)
	require.NoError(t, require.Err(m.Logits(b, b.Tokens("tokens", 1, 1, 4))))
	weights := map[string]*tensor.Dense{}
	for _, n := range b.Learnables() {
		weights[n.Name()] = n.Value().(*tensor.Dense)
	}
	return weights
}

// A model of a bucket has the weights of the folder, and so has what Save makes of it there.
func TestModelsComeFromBucketsAndGoThere(t *testing.T) {
	objectstore.Start(t)
	const folder = "../models/testdata/gpt2"
	upload(t, folder, "s3://bucket/gpt2")
	local := require.Value(models.Load(folder))(t)
	defer local.Close()
	want := learned(t, local)
	for _, url := range []string{"s3://bucket/gpt2", "s3://bucket/saved"} {
		m := require.Value(models.Load(url, bucket.Open))(t)
		defer m.Close()
		got := learned(t, m)
		require.Equal(t, url, len(got), len(want))
		for name, w := range want {
			require.Slices(t, name, got[name].Data().([]float32), w.Data().([]float32))
		}
		require.Fails(t, "Save", m.Save(url+"/", maps.All(got)), "the model was loaded from there")
		if url == "s3://bucket/gpt2" {
			require.NoError(t, m.Save("s3://bucket/saved", maps.All(got)))
			require.NoError(t, m.Save("s3://bucket/saved", maps.All(got))) // over what is there
			require.Equal(t, "the parts", require.Value(m.Fingerprint())(t),
				require.Value(local.Fingerprint())(t))
		}
	}
}

func TestTokenizersComeFromBuckets(t *testing.T) {
	objectstore.Start(t)
	const folder = "../models/tokenizer/testdata/gpt2"
	upload(t, folder, "s3://bucket/gpt2")
	want := require.Value(tokenizer.Load(folder))(t)
	got := require.Value(tokenizer.Load("s3://bucket/gpt2", bucket.Open))(t)
	require.Slices(t, "tokens", got.Encode("It is.", true), want.Encode("It is.", true))
}

// What readers of files return does not depend on where the files are.
func TestSetsAreReadFromBuckets(t *testing.T) {
	objectstore.Start(t)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "t.csv"), []byte("a,b\n1,x\n2,y\n"), 0o666))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "t.txt"), []byte("abcabc"), 0o666))
	red := image.NewRGBA(image.Rect(0, 0, 2, 2))
	uniform := image.NewUniform(color.RGBA{255, 0, 0, 255})
	draw.Draw(red, red.Bounds(), uniform, image.Point{}, draw.Src)
	var photo bytes.Buffer
	require.NoError(t, errors.Join(png.Encode(&photo, red),
		os.MkdirAll(filepath.Join(dir, "photos", "red"), 0o777),
		os.WriteFile(filepath.Join(dir, "photos", "red", "1.png"), photo.Bytes(), 0o666)))
	upload(t, dir, objectstore.URL)
	from := data.Source(bucket.Open)
	table, classes, err := from.CSV("s3://bucket/t.csv", "b")
	require.Check(t, err == nil && table.Len() == 2 && strings.Join(classes, "") == "xy",
		"%v %v %v", table, classes, err)
	text, letters, err := from.Text("s3://bucket/t.txt", 2)
	require.Check(t, err == nil && text.Len() == 2 && string(letters) == "abc", "%v %q %v", text,
		letters, err)
	_, _, err = from.CSV("s3://bucket/none.csv", "b")
	require.Fails(t, "a table that is not there", err, fs.ErrNotExist)
	_, _, err = data.CSV("s3://bucket/t.csv", "b")
	require.Fails(t, "without a store", err, "bucket.Open")
	set, classes, err := from.Images("s3://bucket/photos", 2, 2)
	require.That(t, err == nil && set.Len() == 1 && strings.Join(classes, "") == "red", "%v %v",
		classes, err)
	pixels, class := make([]float32, 12), make([]int, 1)
	require.NoError(t, set.Read(0, []any{pixels, class}))
	require.Slices(t, "pixels", pixels, []float32{1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0})
}

// Weights are files of a bucket as they are of a disk, and fit's checkpoints, too.
func TestFitSavesToABucket(t *testing.T) {
	objectstore.Start(t)
	g := gorgonia.NewGraph()
	w := gorgonia.NewVector(g, tensor.Float64, gorgonia.WithShape(2), gorgonia.WithName("w"),
		gorgonia.WithInit(gorgonia.Ones()))
	x := gorgonia.NewMatrix(g, tensor.Float64, gorgonia.WithShape(2, 2), gorgonia.WithName("x"))
	cost := gorgonia.Must(gorgonia.Mean(gorgonia.Must(gorgonia.Mul(x, w))))
	_, err := gorgonia.Grad(cost, w)
	require.NoError(t, err)
	m := require.Value(vm.New(g, nil, vm.WithSolver(&solver.SGD{Rate: 1}, w),
		vm.WithDataParallel(autograd.Solo(), autograd.WithStore(bucket.Open))))(t)
	defer m.Close()
	rows := tensor.New(tensor.WithBacking([]float64{1, 0, 0, 1, 1, 1, 1, 1}),
		tensor.WithShape(4, 2))
	set := require.Value(data.Tensors(rows))(t)
	r, err := fit.Run(t.Context(), m, fit.Data{Set: set, Inputs: gorgonia.Nodes{x}, Loss: cost},
		fit.Epochs(3), fit.Checkpoint(run, 0))
	require.Check(t, err == nil && len(r.Epochs) == 3 && strings.HasPrefix(r.Best, run+"/step-"),
		"%+v: %v", r, err)
	want := append([]float64{}, w.Value().Data().([]float64)...)
	saved := require.Value(autograd.ReadWeights(run, bucket.Open))(t)
	require.Slices(t, "the newest", saved["w"].Data().([]float64), want)
	require.NoError(t, autograd.SaveWeights(run+"/w.safetensors", gorgonia.Nodes{w}, bucket.Open))
	w.Value().Data().([]float64)[0] = 7
	require.NoError(t, autograd.LoadWeights(run+"/w.safetensors", gorgonia.Nodes{w},
		autograd.FromStore(bucket.Open)))
	require.Slices(t, "the file", w.Value().Data().([]float64), want)
	require.NoError(t, require.Err(fit.ReadMapping(run, bucket.Open)))
}
