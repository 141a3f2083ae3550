package boundary

import (
	"encoding/binary"
	"encoding/hex"
	"hash/crc32"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/eae-runtime/eae-runtime/gocore/tensor"
)

func sampleLayout(t testing.TB, c code) *layout {
	s := newSource(512)
	l, err := plan(-3, []tensor.Tensor{
		s.at(4, tensor.Float32, []int64{2, 3}, []int64{3, 1}), s.at(8, tensor.Float32, []int64{2}, []int64{0}),
		s.at(128, tensor.Int64, nil, nil), s.at(0, tensor.Bool, []int64{0}, []int64{1}),
	}, c)
	require.NoError(t, err)
	return l
}

// Every byte of a header. A change here is a change of the format: raise the version.
func TestHeaderBytes(t *testing.T) {
	want := strings.Join([]string{
		"45414542 0100 01 00", // EAEB, version 1, fp16
		"fdffffffffffffff",    // boundary -3
		"02000000 04000000",   // 2 spans, 4 tensors
		"4800000000000000",    // payload: 12 bytes, padding to 64, 8 bytes
		"2c010000 00000000",   // header length 300
		"01 04 0400 00000000", // span 0: fp16 of 4-byte elements, phase 4
		"1800000000000000 0000000000000000 0c00000000000000", // 24 bytes in memory, payload 0..12
		"00 00 0000 00000000",                                // span 1: as it is, phase 0
		"0800000000000000 4000000000000000 0800000000000000", // 8 bytes, payload 64..72
		"02 20 0100 00000000 0000000000000000",               // tensor 0: float32, span 0, offset 0
		"01000000 00000000 02000000 00000000",                // CPU 0, 2 dimensions
		"0200000000000000 0300000000000000 0300000000000000 0100000000000000",
		"02 20 0100 00000000 0400000000000000", // tensor 1: float32, span 0, offset 4
		"01000000 00000000 01000000 00000000",  // CPU 0, 1 dimension
		"0200000000000000 0000000000000000",    // size 2, stride 0
		"00 40 0100 01000000 0000000000000000", // tensor 2: int64, span 1
		"01000000 00000000 00000000 00000000",  // CPU 0, 0 dimensions
		"06 08 0100 ffffffff 0000000000000000", // tensor 3: bool, no span
		"01000000 00000000 01000000 00000000",  // CPU 0, 1 dimension
		"0000000000000000 0100000000000000",    // size 0, stride 1
	}, "")
	got := encodeHeader(-3, asHalf, sampleLayout(t, asHalf))
	require.Equal(t, strings.ReplaceAll(want, " ", ""), hex.EncodeToString(got[:len(got)-4]))
	require.Equal(t, crc32.Checksum(got[:len(got)-4], crc32.MakeTable(crc32.Castagnoli)), binary.LittleEndian.Uint32(got[len(got)-4:]))

	key, c, l, err := decodeHeader(append(got, 1, 2, 3))
	require.NoError(t, err)
	require.Equal(t, int64(-3), key)
	require.Equal(t, asHalf, c)
	require.Equal(t, got, encodeHeader(key, c, l))
}

func TestHeaderRefusesEveryFlippedBit(t *testing.T) {
	good := encodeHeader(5, asIs, sampleLayout(t, asIs))
	for i := range good {
		for bit := range 8 {
			bad := append([]byte(nil), good...)
			bad[i] ^= 1 << bit
			_, _, _, err := decodeHeader(bad)
			require.Error(t, err, "byte %d bit %d", i, bit)
		}
	}
	for n := range good {
		_, _, _, err := decodeHeader(good[:n])
		require.Error(t, err, "%d bytes", n)
	}
}

// resum makes a header's checksum right again, so that the tables behind it are reached.
func resum(b []byte) []byte {
	if len(b) >= fixedLen+crcLen {
		binary.LittleEndian.PutUint32(b[32:], uint32(len(b)))
		binary.LittleEndian.PutUint32(b[len(b)-crcLen:], crc32.Checksum(b[:len(b)-crcLen], castagnoli))
	}
	return b
}

func FuzzDecodeHeader(f *testing.F) {
	f.Add(encodeHeader(1, asIs, sampleLayout(f, asIs)), true)
	f.Add(encodeHeader(-1, asBrain, sampleLayout(f, asBrain)), false)
	f.Add([]byte(magic), true)
	f.Fuzz(func(t *testing.T, data []byte, fix bool) {
		data = append([]byte(nil), data...)
		if fix {
			data = resum(data)
		}
		key, c, l, err := decodeHeader(data)
		if err != nil {
			return
		}
		if len(l.spans)*spanLen+len(l.views)*tensorLen > len(data) {
			t.Fatalf("%d spans and %d tensors out of %d bytes", len(l.spans), len(l.views), len(data))
		}
		again := encodeHeader(key, c, l)
		if string(again) != string(data[:len(again)]) {
			t.Fatal("what was decoded does not encode to the same bytes")
		}
	})
}
