import io.grpc.CallOptions;
import io.grpc.ManagedChannel;
import io.grpc.MethodDescriptor;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import io.grpc.stub.ClientCalls;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;

/**
 * A caller as grpc-java makes one: threads that share a connection.
 *
 * <p>usage: Client ADDRESS REQUEST_FILE THREADS CALLS SECONDS
 *
 * <p>The file is a ModelInferRequest without an id. Each call gets an id of its own, and its answer
 * has to hold that id. Prints how many were answered and, by status, how many were not.
 */
public final class Client {
  private static final MethodDescriptor.Marshaller<byte[]> RAW =
      new MethodDescriptor.Marshaller<>() {
        @Override
        public InputStream stream(byte[] value) {
          return new ByteArrayInputStream(value);
        }

        @Override
        public byte[] parse(InputStream stream) {
          try {
            return stream.readAllBytes();
          } catch (IOException error) {
            throw new UncheckedIOException(error);
          }
        }
      };
  static final MethodDescriptor<byte[], byte[]> INFER =
      MethodDescriptor.<byte[], byte[]>newBuilder(RAW, RAW)
          .setType(MethodDescriptor.MethodType.UNARY)
          .setFullMethodName("inference.GRPCInferenceService/ModelInfer")
          .build();

  public static void main(String[] args) throws Exception {
    byte[] message = Files.readAllBytes(Path.of(args[1]));
    int threads = Integer.parseInt(args[2]);
    int calls = Integer.parseInt(args[3]);
    int seconds = Integer.parseInt(args[4]);
    ManagedChannel channel = NettyChannelBuilder.forTarget(args[0]).usePlaintext().build();
    Map<String, Integer> counts = new TreeMap<>();
    var pool = Executors.newFixedThreadPool(threads);
    for (int i = 0; i < threads; i++) {
      int thread = i;
      pool.submit(
          () -> {
            for (int j = 0; j < calls; j++) {
              String id = String.format("%04d.%06d", thread, j);
              String ended = call(channel, message, id, seconds);
              synchronized (counts) {
                counts.merge(ended, 1, Integer::sum);
              }
            }
          });
    }
    pool.shutdown();
    pool.awaitTermination(1, TimeUnit.HOURS);
    counts.forEach((ended, count) -> System.out.println(ended + " " + count));
    channel.shutdownNow();
  }

  static byte[] withId(byte[] message, String id) {
    byte[] text = id.getBytes(StandardCharsets.US_ASCII);
    byte[] request = new byte[message.length + 2 + text.length];
    System.arraycopy(message, 0, request, 0, message.length);
    request[message.length] = 0x1a; // field 3
    request[message.length + 1] = (byte) text.length;
    System.arraycopy(text, 0, request, message.length + 2, text.length);
    return request;
  }

  static String call(ManagedChannel channel, byte[] message, String id, int seconds) {
    byte[] request = withId(message, id);
    CallOptions options = CallOptions.DEFAULT.withDeadlineAfter(seconds, TimeUnit.SECONDS);
    try {
      byte[] answer = ClientCalls.blockingUnaryCall(channel, INFER, options, request);
      boolean isOwn = new String(answer, StandardCharsets.ISO_8859_1).contains(id);
      return isOwn ? "OK" : "WrongAnswer";
    } catch (StatusRuntimeException error) {
      return error.getStatus().getCode().name();
    }
  }
}
